// The catalogue of models, and the details and actions of one model.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { tryAddress } from "../cards.js";
import { act } from "../edge.js";
import { mesh as known, useMesh } from "../mesh.js";
import { Chip, Confirm, Dialog, Empty, Icon, Problem, State, Words } from "../parts.js";
import { MEANING, STATES, bytes, number, plural, seconds, sentence, short } from "../text.js";

const ROW = 56;
const AROUND = 6;
const ORDER = ["resident", "loading", "downloading", "warm", "failed", "cold", "absent"];

export function ModelsView({ query, go, open }) {
  const mesh = useMesh();
  const [text, setText] = useState(query.q || "");
  const [state, setState] = useState(query.state || "");
  const [task, setTask] = useState(query.task || "");
  const [asked, setAsked] = useState(null);
  useEffect(() => go("models", { q: text, state, task }, true), [text, state, task]);

  const all = useMemo(
    () =>
      [...mesh.models.values()].sort(
        (one, two) => ORDER.indexOf(one.state) - ORDER.indexOf(two.state) || (one.id.toLowerCase() < two.id.toLowerCase() ? -1 : 1),
      ),
    [mesh.catalogue],
  );
  const counts = useMemo(() => {
    const found = new Map();
    for (const model of all) found.set(model.state, (found.get(model.state) || 0) + 1);
    return found;
  }, [all]);
  const tasks = useMemo(() => [...new Set(all.flatMap((model) => model.card?.tasks || []))].sort(), [all]);
  const shown = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return all.filter(
      (model) =>
        (!state || model.state === state) &&
        (!task || model.card?.tasks.includes(task)) &&
        words.every((word) => model.id.toLowerCase().includes(word) || model.card?.family.includes(word)),
    );
  }, [all, text, state, task]);
  const reset = () => [setText(""), setState(""), setTask("")];

  return html`<div class="view">
    <div class="title"><h1>Models</h1><span class="muted">${number(shown.length)}${shown.length !== all.length ? ` of ${number(all.length)}` : ""}</span></div>
    <div class="tools">
      <label class="search"
        ><${Icon} name="search" /><input id="search" type="search" placeholder="Search by name or family" aria-label="Search models" value=${text}
          autocomplete="off" spellcheck=${false} onInput=${(event) => setText(event.target.value)} /><kbd>/</kbd></label>
      <div class="chips" role="group" aria-label="State">
        <button class="filter" aria-pressed=${!state} onClick=${() => setState("")}>All</button>
        ${ORDER.filter((one) => counts.get(one)).map(
          (one) => html`<button key=${one} class="filter" aria-pressed=${state === one} onClick=${() => setState(state === one ? "" : one)}>
            ${STATES[one][0]} <span>${number(counts.get(one))}</span>
          </button>`,
        )}
      </div>
      ${tasks.length > 1 &&
      html`<select aria-label="Task" value=${task} onChange=${(event) => setTask(event.target.value)}>
        <option value="">Any task</option>
        ${tasks.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select>`}
    </div>
    ${!all.length
      ? html`<section class="card"><${Empty} heading="No models yet"
          action=${html`<button class="primary" onClick=${() => setAsked("")}>Load a model by name</button>`}>
          Workers list the models on their disks (<code>SHOAL_MODELS</code>). If a store is configured, other models are downloaded by their first request.<//></section>`
      : !shown.length
        ? html`<section class="card"><${Empty} heading="No model matches"
            action=${html`<button onClick=${reset}>Show all</button>${/^[^\s/]+\/[^\s/]+$/.test(text) && html`<button class="primary" onClick=${() => setAsked(text)}>Load ${text}</button>`}`}>
            Load any other model by its full name, <code>org/name</code>.<//></section>`
        : html`<${Words} words=${ORDER.map((one) => [STATES[one][0], MEANING[one]])} label="Explain the states" /><${Rows} models=${shown} open=${open} />`}
    ${asked !== null && (asked ? html`<${Confirm} action="load" model=${asked} pools=${pools()} onClose=${() => setAsked(null)} />` : html`<${ByName} onClose=${() => setAsked(null)} />`)}
  </div>`;
}

const pools = () => [...new Set([...known.workers.values()].map((worker) => worker.pool))].sort();

function ByName({ onClose }) {
  const [name, setName] = useState("");
  const [confirmed, setConfirmed] = useState(false);
  if (confirmed) return html`<${Confirm} action="load" model=${name} pools=${pools()} onClose=${onClose} />`;
  const submit = (event) => {
    event.preventDefault();
    if (name.trim()) [setName(name.trim()), setConfirmed(true)];
  };
  return html`<${Dialog} kind="ask" label="Load a model" onClose=${onClose}>
    <form onSubmit=${submit}>
      <label class="field"><span>Name</span>
        <input value=${name} placeholder="org/name" spellcheck=${false} autocomplete="off" autofocus onInput=${(event) => setName(event.target.value)} /></label>
      <footer><button type="button" onClick=${onClose}>Cancel</button><button class="primary" disabled=${!name.trim()}>Continue</button></footer>
    </form>
  <//>`;
}

// Only the visible rows are in the document; the page itself scrolls.
function Rows({ models, open }) {
  const list = useRef();
  const [sight, setSight] = useState([0, 30]);
  const wanted = useRef(-1); // the row that has the focus
  useLayoutEffect(() => {
    const look = () => {
      const top = list.current.getBoundingClientRect().top;
      const first = Math.max(0, Math.floor(-top / ROW) - AROUND);
      const last = Math.ceil((window.innerHeight - top) / ROW) + AROUND;
      setSight((before) => (before[0] === first && before[1] === last ? before : [first, last]));
    };
    look();
    window.addEventListener("scroll", look, { passive: true });
    window.addEventListener("resize", look);
    return () => [window.removeEventListener("scroll", look), window.removeEventListener("resize", look)];
  }, [models.length]);
  // A row that is removed or moved loses the focus: restore it.
  useLayoutEffect(() => {
    if (wanted.current < 0) return;
    const button = list.current.querySelector(`[data-at="${wanted.current}"]`);
    if (button && document.activeElement !== button) button.focus({ preventScroll: true });
  });
  const entered = (event) => (wanted.current = Number(event.target.dataset?.at ?? -1));
  const left = (event) => event.relatedTarget && !list.current.contains(event.relatedTarget) && (wanted.current = -1);
  useEffect(() => {
    const pointed = () => (wanted.current = -1);
    window.addEventListener("pointerdown", pointed, true);
    return () => window.removeEventListener("pointerdown", pointed, true);
  }, []);
  const move = (event) => {
    const at = Number(event.target.dataset?.at ?? -1);
    const page = Math.max(1, Math.floor(window.innerHeight / ROW) - 3);
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -models.length, End: models.length }[event.key];
    if (at < 0 || !step) return;
    event.preventDefault();
    const next = Math.min(models.length - 1, Math.max(0, at + step));
    const top = list.current.getBoundingClientRect().top + window.scrollY + next * ROW;
    const [low, high] = [window.scrollY + 130, window.scrollY + window.innerHeight - ROW - 90];
    if (top < low) window.scrollTo({ top: top - 130 });
    if (top > high) window.scrollTo({ top: top - window.innerHeight + ROW + 90 });
    wanted.current = next;
    setSight((before) => (next >= before[0] && next < before[1] ? [...before] : [Math.max(0, next - 30), next + 30]));
  };
  const [first, last] = [Math.min(sight[0], models.length), Math.min(sight[1], models.length)];
  return html`<div class="card rows" role="table" aria-label="Models" aria-rowcount=${models.length + 1}>
    <div class="row head" role="row" aria-rowindex="1">
      <span role="columnheader">Model</span><span role="columnheader" class="tasks">Tasks</span><span role="columnheader" class="n size">Size</span>
      <span role="columnheader" class="n length">Tokens</span><span role="columnheader" class="n speed">Tokens/s</span><span role="columnheader" class="where">State</span>
    </div>
    <div class="window" role="rowgroup" ref=${list} style=${{ height: `${models.length * ROW}px` }} onKeyDown=${move} onFocusIn=${entered} onFocusOut=${left}>
      ${models.slice(first, last).map((model, at) => html`<${Row} key=${model.id} model=${model} at=${first + at} open=${open} />`)}
    </div>
  </div>`;
}

function Row({ model, at, open }) {
  const { card } = model;
  const size = card?.bytes || Math.max(0, ...model.places.map((place) => place.bytes));
  const speed = Math.max(0, ...model.places.map((place) => place.tokens_per_second));
  const holders = model.places.filter((place) => place.state === model.state).length;
  return html`<div class="row" role="row" aria-rowindex=${at + 2} style=${{ top: `${at * ROW}px` }} onClick=${() => open(model.id)}>
    <span role="cell" class="name">
      <button class="link" data-at=${at} onClick=${(event) => [event.stopPropagation(), open(model.id)]}>${model.id}</button>
      <span class="sub">${about(model)}</span>
    </span>
    <span role="cell" class="tasks">${(card?.tasks || []).map((task) => html`<${Chip} key=${task}>${task}<//>`)}</span>
    <span role="cell" class="n size">${size ? bytes(size) : "–"}</span>
    <span role="cell" class="n length">${card?.max_tokens ? number(card.max_tokens) : "–"}</span>
    <span role="cell" class="n speed">${speed ? short(speed) : "–"}</span>
    <span role="cell" class="where">
      <${State} state=${model.state} quiet=${true} />
      <span class="sub">${model.places.some((place) => place.pinned) ? "pinned · " : ""}${model.places.length ? `on ${plural(holders, "worker")}` : "on no worker"}</span>
    </span>
  </div>`;
}

function about({ card }) {
  if (!card) return "files not read yet";
  const width = card.dimensions ? `${number(card.dimensions)} dimensions` : card.token_dimensions ? `${number(card.token_dimensions)} dimensions per token` : "";
  return [card.family, width].filter(Boolean).join(" · ") || "available in this mesh";
}

// One model: its actions, workers, properties and placement.
export function ModelDrawer({ id, onClose }) {
  const mesh = useMesh();
  const model = mesh.models.get(id);
  const [asked, setAsked] = useState("");
  const [check, setCheck] = useState(null);
  const [checking, setChecking] = useState(false);
  const run = async () => {
    setChecking(true);
    try {
      setCheck({ answer: await act("check", id) });
    } catch (failure) {
      setCheck({ failure });
    }
    setChecking(false);
  };
  const changes = (model?.places || []).map((place) => `${place.worker} ${place.state} ${place.pinned}`).join();
  useEffect(() => {
    if (mesh.status !== "refused") run();
  }, [id, changes]);
  const places = model?.places || [];
  const resident = places.some((place) => place.state === "resident");
  const pinned = places.some((place) => place.pinned);
  const card = model?.card;
  return html`<${Dialog} kind="drawer" label=${id} onClose=${onClose}>
    <div class="body">
      <div class="line-up">
        ${model ? html`<${State} state=${model.state} />` : html`<${State} state="absent" />`}
        ${(card?.tasks || []).map((task) => html`<${Chip} key=${task}>${task}<//>`)}
        ${pinned && html`<${Chip} tone="accent">pinned<//>`}
      </div>
      ${mesh.status !== "refused" &&
      html`<div class="actions">
        <button class=${resident ? "" : "primary"} onClick=${() => setAsked("load")}>${resident ? "Load another copy" : "Load"}</button>
        <button disabled=${!resident} onClick=${() => setAsked("evict")}>Evict</button>
        <button disabled=${!resident && !pinned} onClick=${() => setAsked(pinned ? "unpin" : "pin")}>${pinned ? "Unpin" : "Pin"}</button>
        <button class="check-again" onClick=${run} disabled=${checking}>${checking ? "Checking …" : "Check"}</button>
        <a class="button" href=${tryAddress(id, model)}>Try it</a>
      </div>`}
      ${model?.error && html`<div class="problem"><strong>The last load failed</strong><p>${model.error}</p></div>`}
      ${places.length > 0 &&
      html`<h3>Workers</h3>
        <ul class="places">
          ${places.map(
            (place) => html`<li key=${place.worker}>
              <div><strong>${place.worker}</strong><${State} state=${place.state} />${place.pinned && html`<${Chip} tone="accent">pinned<//>`}${place.leaving && html`<${Chip} tone="warn">leaving<//>`}</div>
              <span class="small muted">${[
                place.state === "resident" && `${bytes(place.bytes)} on the device`,
                place.host_bytes && `${bytes(place.host_bytes)} in host memory`,
                place.load_seconds && `loaded in ${seconds(place.load_seconds)}`,
                place.tokens_per_second && `${short(place.tokens_per_second)} tokens/s`,
                place.download && `${bytes(place.downloaded)} of ${bytes(place.download)} downloaded`,
                place.adapters.length && plural(place.adapters.length, "adapter"),
              ]
                .filter(Boolean)
                .join(" · ") || "no measurements yet"}</span>
              ${place.error && html`<p class="small bad">${place.error}</p>`}
            </li>`,
          )}
        </ul>`}
      ${card && html`<${Card} card=${card} />`}
      ${!model && html`<p class="muted">No worker has this model. Load it to download it from a store.</p>`}
      ${mesh.status !== "refused" && html`<${Why} check=${check} />`}
    </div>
    ${asked && html`<${Confirm} action=${asked} model=${id} pools=${pools()} onClose=${() => setAsked("")} />`}
  <//>`;
}

// This is the last section, because it arrives later and has any length: nothing else moves.
function Why({ check }) {
  const { answer, failure } = check || {};
  return html`<h3>Placement</h3>
    ${!check && html`<p class="muted" role="status">Asking the router …</p>`}
    ${failure && html`<${Problem} failure=${failure} />`}
    ${answer &&
    html`<p>${sentence(answer.message)}</p>
      ${answer.plan && html`<p class="muted">The scheduler's last plan: ${sentence(answer.plan).replace(/^./, (letter) => letter.toLowerCase())}</p>`}
      ${answer.workers.length > 0 &&
      html`<ul class="why">
        ${answer.workers.map(
          (one) => html`<li key=${one.id}>
            <i class="key ${one.eligible ? "good" : "idle"}"></i>
            <div><strong>${one.id}</strong> <span class="muted">${one.pool}</span><p>${sentence(one.reason)}</p></div>
            <span class="n" title="Suitability, 0 to 1">${one.score.toFixed(2)}</span>
          </li>`,
        )}
      </ul>`}`}`;
}

function Card({ card }) {
  const rows = [
    ["Family", card.family],
    ["Representations", card.forms.join(", ").replaceAll("_", " ")],
    ["Dimensions", card.dimensions ? number(card.dimensions) : ""],
    ["Dimensions per token", card.token_dimensions ? number(card.token_dimensions) : ""],
    ["Maximum length", card.max_tokens ? `${number(card.max_tokens)} tokens` : ""],
    ["Weights", card.bytes ? bytes(card.bytes) : ""],
    ["Number format", card.data_type],
    ["Labels", card.label_count ? `${card.labels.slice(0, 12).join(", ")}${card.label_count > 12 ? ` and ${number(card.label_count - 12)} more` : ""}` : card.open_labels ? "any" : ""],
    ["Prompts", card.prompts.join(", ")],
    ["Pools", card.pools.join(", then ")],
    ["Revision", card.revision],
  ].filter(([, value]) => value);
  return html`<h3>Properties</h3>
    <dl>${rows.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
