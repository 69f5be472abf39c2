// Components that all views use.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { act } from "./edge.js";
import { STATES, MEANING, bytes, clock, cure, sentence, share, title } from "./text.js";

export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 20 20" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;

const ICONS = {
  mesh: "M4 5h5v4H4zM11 5h5v4h-5zM4 11h5v4H4zM11 11h5v4h-5z",
  models: "M4 5.500h12M4 10h12M4 14.500h12",
  playground: "M6.500 4.500v11l9-5.500z",
  chat: "M4 4.500h12v8.500h-6.500L6 16v-3H4z",
  batches: "M3.500 5.500h13v3.500h-13zM5 9v6.500h10V9M8 12h4",
  jobs: "M4 6.500h12v9H4zM7.500 6.500V4h5v2.500M4 10.500h12",
  history: "M3.500 15.500h13M4.500 12.500l3.500-4 3 2.500 4.500-6",
  key: "M12.500 3.500a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM9.500 10.500l-6 6M5 15l1.500 1.500M7 13l1.500 1.500",
  sun: "M10 6.500a3.500 3.500 0 1 0 0 7 3.500 3.500 0 0 0 0-7zM10 2v2M10 16v2M2 10h2M16 10h2M4.300 4.300l1.400 1.400M14.300 14.300l1.400 1.400M4.300 15.700l1.400-1.400M14.300 5.700l1.400-1.400",
  moon: "M15.500 12A6.500 6.500 0 0 1 8 4.500a6.200 6.200 0 1 0 7.500 7.500z",
  system: "M3.500 4.500h13v9h-13zM7.500 16.500h5",
  help: "M7.500 7.500a2.500 2.500 0 1 1 3.700 2.200c-.8.500-1.200.9-1.200 1.800M10 14.300v.2",
  close: "M5 5l10 10M15 5L5 15",
  search: "M9 4a5 5 0 1 0 0 10A5 5 0 0 0 9 4zM12.700 12.700L16.500 16.500",
  copy: "M7.500 7.500h8v8h-8zM4.500 12.500v-8h8",
  pin: "M7.500 3.500h5l-.5 5 2.500 2.500h-9L8 8.500zM10 11v5.500",
  plus: "M10 4.500v11M4.500 10h11",
};

export function State({ state, quiet }) {
  const [word, tone] = STATES[state] || [state, "idle"];
  return html`<span class="state ${tone}" title=${quiet ? undefined : MEANING[state]}><i></i>${word}</span>`;
}

// A collapsed list of terms: [[word, meaning]].
export function Words({ words, label = "Explain these terms" }) {
  return html`<details class="words"><summary>${label}</summary>
    <dl>${words.map(([word, meaning]) => html`<div key=${word}><dt>${word}</dt><dd>${meaning}</dd></div>`)}</dl></details>`;
}

export const Chip = ({ children, tone = "" }) => html`<span class="chip ${tone}">${children}</span>`;

export function Empty({ heading, children, action }) {
  return html`<div class="empty"><h2>${heading}</h2><p>${children}</p>${action}</div>`;
}

export function Problem({ failure, children }) {
  return html`<div class="problem" role="alert">
    <strong>${title(failure.reason)}</strong>
    <p>${sentence(failure.message)}</p>
    ${cure(failure.reason) && html`<p class="muted">${cure(failure.reason)}</p>`}
    ${(failure.field || failure.requestId) &&
    html`<p class="small muted">
      ${failure.field && html`field <code>${failure.field}</code> `}${failure.requestId && html`request <code>${failure.requestId}</code>`}
    </p>`}
    ${children}
  </div>`;
}

// Adjacent segments, each a share of `whole`; memory with an unknown use is last.
export function Memory({ segments, used, whole, label }) {
  const known = segments.reduce((sum, one) => sum + one.value, 0);
  const other = Math.max(0, used - known);
  return html`<div class="memory" role="img" aria-label="${label}: ${bytes(Math.max(used, known))} of ${bytes(whole)} used">
    ${segments.map(
      (one, at) =>
        html`<i key=${one.name} class="m${at % 4}" style=${{ width: `${share(one.value, whole)}%` }} title="${one.name}: ${bytes(one.value)}"></i>`,
    )}
    ${other > 0 && html`<i class="other" style=${{ width: `${share(other, whole)}%` }} title="other: ${bytes(other)}"></i>`}
  </div>`;
}

export function Bar({ part, whole, tone = "" }) {
  return html`<span class="bar ${tone}" aria-hidden="true"><i style=${{ width: `${share(part, whole)}%` }}></i></span>`;
}

export function Line({ values, width = 160, height = 36, label }) {
  const most = Math.max(1, ...values);
  const step = width / Math.max(29, values.length - 1);
  const begin = width - (values.length - 1) * step;
  const points = values.map((value, at) => `${(begin + at * step).toFixed(1)},${(height - 2 - ((height - 6) * value) / most).toFixed(1)}`);
  return html`<svg class="line" viewBox="0 0 ${width} ${height}" role="img" aria-label=${label} preserveAspectRatio="none">
    <path class="base" d="M0 ${height - 1}H${width}" />
    ${points.length > 1 && html`<path class="under" d=${`M${begin.toFixed(1)},${height - 1} L${points.join(" ")} L${width},${height - 1}Z`} /><polyline points=${points.join(" ")} />`}
  </svg>`;
}

// Show the last part of the model's name only, which fits a narrow column.
function shortened({ text, model }) {
  const at = model ? text.indexOf(model) : -1;
  return at < 0 ? text : html`${text.slice(0, at)}<b>${model.slice(model.lastIndexOf("/") + 1)}</b>${text.slice(at + model.length)}`;
}

export function Events({ events, open }) {
  return html`<section class="card" aria-labelledby="events">
    <header><h2 id="events">Events</h2><span class="muted">${events.length ? "open one for details" : ""}</span></header>
    ${!events.length
      ? html`<p class="muted pad">No events yet. Model loads, evictions and lost workers appear here.</p>`
      : html`<ol class="events" tabindex="0" aria-label="Events, latest first">
          ${events.map((event, at) => {
            const body = html`<time>${clock(event.at)}</time><i class="key ${event.tone}"></i><span>${shortened(event)}</span>`;
            return html`<li key=${`${event.at} ${event.text} ${events.length - at}`}>
              ${event.model ? html`<button title=${event.model} onClick=${() => open(event.model)}>${body}</button>` : html`<div>${body}</div>`}
            </li>`;
          })}
        </ol>`}
  </section>`;
}

// A native dialog: it traps the focus, Escape closes it, and the focus returns to the previous element.
export function Dialog({ kind = "", label, onClose, children }) {
  const element = useRef();
  useEffect(() => {
    const dialog = element.current;
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close();
      if (before && before.isConnected) before.focus();
    };
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onClose();
  };
  // Browsers may close several dialogs with one Escape; close only the topmost.
  const pressed = (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    cancel(event);
  };
  return html`<dialog ref=${element} class=${kind} aria-label=${label} onCancel=${cancel} onKeyDown=${pressed} onClick=${(event) => event.target === element.current && onClose()}>
    <div class="inside">
      <header>
        <h2>${label}</h2>
        <button class="plain square" aria-label="Close" onClick=${onClose}><${Icon} name="close" /></button>
      </header>
      ${children}
    </div>
  </dialog>`;
}

const notices = { list: [], listener: null, next: 1 };

export function notify(tone, text, sticky = false) {
  const notice = { id: notices.next++, tone, text };
  notices.list = [...notices.list, notice].slice(-4);
  notices.listener?.();
  if (!sticky) setTimeout(() => dismiss(notice.id), tone === "bad" ? 12_000 : 6_000);
  return notice.id;
}

export function dismiss(id) {
  notices.list = notices.list.filter((notice) => notice.id !== id);
  notices.listener?.();
}

export function Notices() {
  const element = useRef();
  const [, again] = useState(0);
  useEffect(() => {
    notices.listener = () => again((value) => value + 1);
    return () => (notices.listener = null);
  }, []);
  // Show notices above an open dialog: the last shown popover is on top.
  useEffect(() => {
    element.current.hidePopover?.();
    if (notices.list.length) element.current.showPopover?.();
  }, [notices.list]);
  return html`<div ref=${element} popover="manual" class="notices" role="status" aria-live="polite">
    ${notices.list.map(
      (notice) => html`<div key=${notice.id} class="notice ${notice.tone}">
        <span>${notice.text}</span>
        <button class="plain square" aria-label="Dismiss" onClick=${() => dismiss(notice.id)}><${Icon} name="close" /></button>
      </div>`,
    )}
  </div>`;
}

export function Copy({ text, label = "Copy" }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setCopied(true);
      setTimeout(() => setCopied(false), 1600);
    } catch {
      notify("bad", "The browser denied access to the clipboard: select the text and copy it.");
    }
  };
  return html`<button class="small" onClick=${copy}><${Icon} name="copy" />${copied ? "Copied" : label}</button>`;
}

const ASKED = {
  load: {
    heading: "Load this model?",
    text: "One more worker loads it and may evict other models. The page waits until it is loaded.",
    button: "Load",
  },
  evict: {
    heading: "Evict this model?",
    text: "All workers that hold it unload it after the batches in flight. Waiting and new requests load it again.",
    button: "Evict",
    tone: "danger",
  },
  pin: { heading: "Pin this model?", text: "It stays on its current workers and is not evicted until it is unpinned.", button: "Pin" },
  unpin: { heading: "Unpin this model?", text: "It may be evicted when other models need its memory.", button: "Unpin" },
};

const RUNNING = { load: "Loading", evict: "Evicting", pin: "Pinning", unpin: "Unpinning" };

// Ask for confirmation, perform the action, and show its result.
export function Confirm({ action, model, pools = [], onClose }) {
  const [pool, setPool] = useState("");
  const asked = ASKED[action];
  const confirm = async () => {
    onClose();
    const running = notify("plain", `${RUNNING[action]} ${model} …`, true);
    try {
      notify("good", (await act(action, model, pool)).message);
    } catch (error) {
      notify("bad", `${title(error.reason)}: ${sentence(error.message)} ${cure(error.reason)}`);
    } finally {
      dismiss(running);
    }
  };
  return html`<${Dialog} kind="ask" label=${asked.heading} onClose=${onClose}>
    <p class="model-name">${model}</p>
    <p class="muted">${asked.text}</p>
    ${action === "load" &&
    pools.length > 1 &&
    html`<label class="field"><span>Pool</span>
      <select value=${pool} onChange=${(event) => setPool(event.target.value)}>
        <option value="">Model default</option>
        ${pools.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select></label>`}
    <footer>
      <button onClick=${onClose}>Cancel</button>
      <button class=${asked.tone || "primary"} onClick=${confirm} autofocus>${asked.button}</button>
    </footer>
  <//>`;
}
