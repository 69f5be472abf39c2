// Tries a model: one request, its answer, where the time went, and the same request for programs.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { post, token } from "./edge.js";
import { useMesh } from "./mesh.js";
import { Copy, Empty, Problem } from "./parts.js";
import { Encoded, Extracted, Scored, Timings, timingsOf } from "./results.js";
import { KINDS, body, path, snippet } from "./snippets.js";

const VERBS = [["encode", "Encode"], ["score", "Score"], ["extract", "Extract"]];
const EXTRACT_TASKS = ["entities", "classify", "relations"];
const SAMPLES = {
  encode: "A shoal of herring turns as one.\nFish swim together in large groups.\nThe bakery opens at seven.",
  score: "Herring form schools of up to a billion fish.\nThe bakery opens at seven.\nPredators find it hard to single out one fish in a school.\nA carpenter planes a table.",
  extract: "Marie Curie moved from Warsaw to Paris in 1891 and worked at the Sorbonne.",
};
const QUERY = "Why do fish swim in schools?";
const LABELS = { entities: "person, city, organisation, date", classify: "science, sport, cooking", relations: "worked at, moved to" };

const serves = (model, verb) => {
  const tasks = model.card?.tasks;
  if (!tasks?.length) return true;
  return verb === "extract" ? EXTRACT_TASKS.some((task) => tasks.includes(task)) : tasks.includes(verb);
};

const list = (text) => text.split(",").map((one) => one.trim()).filter(Boolean);
const lines = (text) => text.split("\n").map((one) => one.trim()).filter(Boolean);

export function PlaygroundView({ query, go }) {
  const mesh = useMesh();
  const [verb, setVerb] = useState(VERBS.some(([name]) => name === query.verb) ? query.verb : "encode");
  const [model, setModel] = useState(query.model || null);
  const [texts, setTexts] = useState({ ...SAMPLES });
  const [question, setQuestion] = useState(QUERY);
  const [role, setRole] = useState("document");
  const [form, setForm] = useState("");
  const [task, setTask] = useState("entities");
  const [labels, setLabels] = useState({ ...LABELS });
  const [kinds, setKinds] = useState("person, city, organisation");
  const [threshold, setThreshold] = useState("");
  const [multi, setMulti] = useState(false);
  const [other, setOther] = useState("");
  const [more, setMore] = useState({ pool: "", adapter: "", priority: "", tenant: "", requestId: "" });
  const [running, setRunning] = useState(null);
  const [answer, setAnswer] = useState(null);
  const [failure, setFailure] = useState(null);
  const result = useRef();

  const models = useMemo(
    () => [...mesh.models.values()].sort((one, two) => Number(two.state === "resident") - Number(one.state === "resident") || (one.id < two.id ? -1 : 1)),
    [mesh.catalogue],
  );
  const fitting = models.filter((one) => serves(one, verb));
  const chosen = model ?? fitting[0]?.id ?? "";
  const card = mesh.models.get(chosen)?.card;
  const tasks = EXTRACT_TASKS.filter((one) => !card?.tasks?.length || card.tasks.includes(one));
  const doing = tasks.includes(task) ? task : tasks[0] || "entities";
  useEffect(() => go("playground", { verb, model }, true), [verb, model]);
  const turn = (name) => {
    setVerb(name);
    setAnswer(null);
    setFailure(null);
    const known = mesh.models.get(model);
    if (known && !serves(known, name)) setModel(null);
  };

  const ask = {
    verb, model: chosen, texts: lines(texts[verb]), query: question.trim(), role, forms: form ? [form] : [], task: doing,
    labels: list(doing === "relations" ? kinds : labels[doing]), relations: list(labels.relations),
    threshold: threshold === "" ? null : Number(threshold), multi, pool: more.pool, adapter: more.adapter, priority: more.priority, tenant: more.tenant,
  };
  const missing = !chosen ? "Choose a model." : !ask.texts.length ? "Write a text." : verb === "score" && !ask.query ? "Write what is searched for." : "";

  const run = async () => {
    if (missing || running) return;
    const controller = new AbortController();
    setRunning(controller);
    setFailure(null);
    const own = { ...(more.tenant ? { "x-shoal-tenant": more.tenant } : {}), ...(more.requestId ? { "x-request-id": more.requestId } : {}) };
    const one = async (what) => {
      const begin = performance.now();
      const response = await post(path(what), body(what), own, controller.signal);
      const content = await response.json();
      return { content, elapsed: performance.now() - begin, stages: timingsOf(response.headers.get("server-timing")), requestId: response.headers.get("x-request-id") };
    };
    try {
      const first = await one(ask);
      const second = verb === "score" && other && other !== chosen ? await one({ ...ask, model: other }) : null;
      setAnswer({ ask, ...first, second });
    } catch (error) {
      setAnswer(null);
      if (error.name !== "AbortError") setFailure(error);
    }
    setRunning(null);
    if (window.innerWidth < 900) result.current?.scrollIntoView({ block: "start" });
  };
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) [event.preventDefault(), run()];
  };
  const set = (name) => (event) => setMore({ ...more, [name]: event.target.value });

  return html`<div class="view playground" onKeyDown=${keys}>
    <div class="title"><h1>Playground</h1></div>
    <div class="bench">
      <form class="card form" onSubmit=${(event) => [event.preventDefault(), run()]}>
        <div class="segments" role="group" aria-label="Verb">
          ${VERBS.map(([name, word]) => html`<button type="button" key=${name} aria-pressed=${verb === name} onClick=${() => turn(name)}>${word}</button>`)}
        </div>
        <label class="field"><span>Model</span>
          <input id="search" list="models" value=${chosen} placeholder="org/name" spellcheck="false" autocomplete="off" onInput=${(event) => setModel(event.target.value.trim())} />
          <datalist id="models">${fitting.slice(0, 300).map((one) => html`<option key=${one.id} value=${one.id} />`)}</datalist></label>
        ${verb === "score" && html`<label class="field"><span>Query</span><input value=${question} onInput=${(event) => setQuestion(event.target.value)} /></label>`}
        ${verb === "extract" &&
        html`<div class="field"><span id="task">Task</span><div class="segments small" role="group" aria-labelledby="task">
          ${tasks.map((one) => html`<button type="button" key=${one} aria-pressed=${doing === one} onClick=${() => setTask(one)}>${one[0].toUpperCase() + one.slice(1)}</button>`)}
        </div></div>`}
        <label class="field"><span>${verb === "score" ? "Documents" : "Texts"} <em>one a line</em></span>
          <textarea rows=${verb === "extract" ? 4 : 6} value=${texts[verb]} onInput=${(event) => setTexts({ ...texts, [verb]: event.target.value })}></textarea></label>
        ${verb === "extract" &&
        html`<label class="field"><span>${doing === "relations" ? "Relations" : "Labels"} <em>with commas</em></span>
            <input value=${labels[doing]} onInput=${(event) => setLabels({ ...labels, [doing]: event.target.value })} /></label>
          ${doing === "relations" && html`<label class="field"><span>Kinds of entities <em>with commas</em></span><input value=${kinds} onInput=${(event) => setKinds(event.target.value)} /></label>`}
          <div class="pair">
            <label class="field"><span>Threshold</span><input type="number" min="-1" max="1" step="0.05" placeholder="the model's own" value=${threshold} onInput=${(event) => setThreshold(event.target.value)} /></label>
            ${doing === "classify" && html`<label class="check"><input type="checkbox" checked=${multi} onChange=${(event) => setMulti(event.target.checked)} />Several labels may fit</label>`}
          </div>`}
        ${verb === "encode" &&
        html`<div class="pair">
          <label class="field"><span>Role</span><select value=${role} onChange=${(event) => setRole(event.target.value)}><option value="document">document</option><option value="query">query</option></select></label>
          <label class="field"><span>Form</span><select value=${form} onChange=${(event) => setForm(event.target.value)}>
            <option value="">the model's own</option>
            ${(card?.forms || []).map((one) => one.replace("multi_vector", "multivector")).map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
          </select></label>
        </div>`}
        ${verb === "score" &&
        html`<label class="field"><span>Compare with <em>optional</em></span><select value=${other} onChange=${(event) => setOther(event.target.value)}>
          <option value="">no other model</option>
          ${fitting.filter((one) => one.id !== chosen).slice(0, 300).map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}
        </select></label>`}
        <details><summary>Pool, adapter, tenant …</summary>
          <div class="pair">
            <label class="field"><span>Pool</span><input value=${more.pool} placeholder="the model's own" onInput=${set("pool")} /></label>
            <label class="field"><span>Adapter</span><input value=${more.adapter} placeholder="none" onInput=${set("adapter")} /></label>
            <label class="field"><span>Priority</span><select value=${more.priority} onChange=${set("priority")}><option value="">interactive</option><option value="bulk">bulk</option></select></label>
            <label class="field"><span>Tenant</span><input value=${more.tenant} placeholder="the token's own" onInput=${set("tenant")} /></label>
            <label class="field"><span>Request id</span><input value=${more.requestId} placeholder="a new one" onInput=${set("requestId")} /></label>
          </div></details>
        <div class="go">
          ${running
            ? html`<button type="button" onClick=${() => running.abort()}>Cancel</button><span class="muted">waiting for the answer …</span>`
            : html`<button class="primary" disabled=${Boolean(missing)}>Run</button><span class="muted">${missing || html`<kbd>Ctrl</kbd> <kbd>Enter</kbd>`}</span>`}
        </div>
      </form>
      <div class="outcome" ref=${result} aria-live="polite" aria-busy=${Boolean(running)}>
        <section class="card result">
          ${failure
            ? html`<${Problem} failure=${failure} />`
            : answer && answer.ask.verb === verb
              ? html`<${Answer} answer=${answer} />`
              : !models.length
                ? html`<${Empty} heading="There is no model to try">No worker has reported one. Write the name of any that a store has, or look under <a href="#/mesh">Mesh</a> whether workers run.<//>`
                : html`<${Empty} heading="Run it to see the answer">${{ encode: "Vectors are compared with each other.", score: "Documents are ranked by how well they answer the query.", extract: "What is found is marked in the text." }[verb]}<//>`}
        </section>
        <${Snippets} ask=${ask} about=${mesh.about} />
      </div>
    </div>
  </div>`;
}

function Answer({ answer }) {
  const { ask, content, second } = answer;
  return html`<${Timings} stages=${answer.stages} elapsed=${answer.elapsed} tokens=${content.usage?.input_tokens} />
    ${ask.verb === "encode" && html`<${Encoded} texts=${ask.texts} items=${content.items} />`}
    ${ask.verb === "score" && html`<${Scored} texts=${ask.texts} scores=${content.scores} other=${second?.content.scores} models=${[ask.model, second?.content.model]} />`}
    ${ask.verb === "extract" && html`<${Extracted} texts=${ask.texts} items=${content.items} />`}
    <p class="small muted">request <code>${answer.requestId}</code></p>`;
}

function Snippets({ ask, about }) {
  const [kind, setKind] = useState("curl");
  const text = snippet(kind, ask.model ? ask : { ...ask, model: "org/name" }, { origin: location.origin, router: about.routers[0] || "localhost:50051", hasToken: Boolean(token()) });
  return html`<section class="card snippets" aria-label="The same request for programs">
    <header>
      <div class="segments small" role="group" aria-label="Copy as">
        ${KINDS.map((one) => html`<button key=${one} aria-pressed=${kind === one} onClick=${() => setKind(one)}>${one}</button>`)}
      </div>
      <${Copy} text=${text} />
    </header>
    <pre tabindex="0" aria-label="Request as ${kind}"><code>${text}</code></pre>
  </section>`;
}
