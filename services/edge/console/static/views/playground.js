// Try a model: one request, its answer, its timings, and the same request as code.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { extractTasks, serves, takes, useUsual, writes } from "../cards.js";
import { post } from "../edge.js";
import { Files } from "../files.js";
import { useMesh } from "../mesh.js";
import { Empty, Problem } from "../parts.js";
import { Encoded, Extracted, Scored, Timings, timingsOf } from "../results.js";
import { body, path } from "../snippets.js";
import { Snippets } from "./snippets.js";

const VERBS = [["encode", "Encode"], ["score", "Score"], ["extract", "Extract"]];
const MAX_TEXT = 200_000;
const MAX_LINE = 4_000;
const MAX_SCHEMA = 32_000;
const SAMPLES = {
  encode: "A shoal of herring turns as one.\nFish swim together in large groups.\nThe bakery opens at seven.",
  score: "Herring form schools of up to a billion fish.\nThe bakery opens at seven.\nPredators find it hard to single out one fish in a school.\nA carpenter planes a table.",
  extract: "Marie Curie moved from Warsaw to Paris in 1891 and worked at the Sorbonne.",
};
const QUERY = "Why do fish swim in schools?";
const LABELS = { entities: "person, city, organisation, date", classify: "science, sport, cooking", relations: "worked at, moved to", regions: "fish, boat, person" };
const SCHEMA = `{
  "entities": ["person", "city"],
  "structures": { "move": { "fields": ["person", "from", "to", "year"] } }
}`;
const TASK_WORDS = { entities: "Entities", classify: "Classify", relations: "Relations", regions: "Regions", structure: "Structure", text: "Text" };
const HAS_LABELS = ["entities", "classify", "relations", "regions"];

const list = (text) => text.split(",").map((one) => one.trim()).filter(Boolean);
const lines = (text) => text.split("\n").map((one) => one.trim()).filter(Boolean);

// Return the parsed schema, or null and the reason.
export function schemaOf(text) {
  try {
    const schema = JSON.parse(text);
    return schema && typeof schema === "object" && !Array.isArray(schema) ? [schema, ""] : [null, "The schema must be a JSON object."];
  } catch (error) {
    return [null, `The schema is not JSON: ${error.message}`];
  }
}

export function PlaygroundView({ query, go }) {
  const mesh = useMesh();
  const [verb, setVerb] = useState(VERBS.some(([name]) => name === query.verb) ? query.verb : "encode");
  const [model, setModel] = useState(query.model || null);
  const [written, setWritten] = useState({ ...SAMPLES });
  const [question, setQuestion] = useState(QUERY);
  const [role, setRole] = useState("document");
  const [form, setForm] = useState("");
  const [task, setTask] = useState("entities");
  const [labels, setLabels] = useState({ ...LABELS });
  const [kinds, setKinds] = useState("person, city, organisation");
  const [schema, setSchema] = useState(SCHEMA);
  const [instruction, setInstruction] = useState("");
  const [files, setFiles] = useState([]);
  const [threshold, setThreshold] = useState("");
  const [multi, setMulti] = useState(false);
  const [other, setOther] = useState("");
  const [more, setMore] = useState({ pool: "", adapter: "", priority: "", tenant: "", requestId: "" });
  const [running, setRunning] = useState(null);
  const [answer, setAnswer] = useState(null);
  const [failure, setFailure] = useState(null);
  const result = useRef();

  const models = useMemo(() => [...mesh.models.values()].sort((one, two) => (one.id < two.id ? -1 : 1)), [mesh.catalogue]);
  const fitting = useMemo(() => models.filter((one) => serves(one, verb)), [models, verb]);
  const first = useUsual(mesh, fitting, verb);
  const chosen = model ?? first;
  const known = mesh.models.get(chosen);
  const { card } = known || {};
  const tasks = extractTasks(known);
  const doing = tasks.includes(task) ? task : tasks[0] || "entities";
  const fileKinds = ["image", "document"].filter((kind) => !known || takes(known, kind));
  const isFitting = !known || serves(known, verb);
  // The task text only reads files; the chat view generates text from text.
  const readsText = (!known || takes(known, "text")) && !(verb === "extract" && doing === "text");
  useEffect(() => go("playground", { verb, model }, true), [verb, model]);
  // If the address names only a model, start with a verb that it serves.
  useEffect(() => {
    if (query.verb || !known || isFitting) return;
    const other = VERBS.find(([name]) => serves(known, name));
    if (other) setVerb(other[0]);
  }, [known?.id]);
  const turn = (name) => {
    setVerb(name);
    setAnswer(null);
    setFailure(null);
    const given = mesh.models.get(model);
    if (given && !serves(given, name)) setModel(null);
  };

  const sent = fileKinds.length ? files.filter((file) => fileKinds.includes(file.kind)) : [];
  const [wanted, wrongSchema] = verb === "extract" && doing === "structure" ? schemaOf(schema) : [null, ""];
  const texts = readsText ? lines(written[verb]) : [];
  const ask = {
    verb, model: chosen, texts, files: sent, names: [...texts, ...sent.map((file) => file.name)], query: question.trim(), role, forms: form ? [form] : [], task: doing,
    labels: list(doing === "relations" ? kinds : labels[doing] || ""), relations: list(labels.relations), schema: wanted, instruction: instruction.trim(),
    threshold: threshold === "" ? null : Number(threshold), multi, pool: more.pool, adapter: more.adapter, priority: more.priority, tenant: more.tenant,
  };
  const missing = !chosen
    ? "Choose a model."
    : !isFitting
      ? `This model does not ${verb}.`
      : !ask.names.length
        ? !fileKinds.length ? "Write a text." : readsText ? "Write a text or choose a file." : "Choose a file."
        : verb === "score" && !ask.query
          ? "Write a query."
          : wrongSchema;

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
          <input id="search" list="models" value=${chosen} placeholder="org/name" maxlength="256" spellcheck=${false} autocomplete="off" onInput=${(event) => setModel(event.target.value.trim())} />
          <datalist id="models">${fitting.slice(0, 300).map((one) => html`<option key=${one.id} value=${one.id} />`)}</datalist></label>
        ${!isFitting &&
        html`<p class="small">${chosen} does not ${verb}. ${writes(known) && html`It generates text: <a href="#/chat?model=${encodeURIComponent(chosen)}">open it in the chat</a>.`}</p>`}
        ${verb === "score" && html`<label class="field"><span>Query</span><input maxlength=${MAX_LINE} value=${question} onInput=${(event) => setQuestion(event.target.value)} /></label>`}
        ${verb === "extract" &&
        tasks.length > 0 &&
        html`<div class="field"><span id="task">Task</span><div class="segments small tasks" role="group" aria-labelledby="task">
          ${tasks.map((one) => html`<button type="button" key=${one} aria-pressed=${doing === one} onClick=${() => setTask(one)}>${TASK_WORDS[one]}</button>`)}
        </div></div>`}
        ${isFitting &&
        readsText &&
        html`<label class="field"><span>${verb === "score" ? "Documents" : "Texts"} <em>one per line</em></span>
          <textarea rows=${verb === "extract" ? 4 : 6} maxlength=${MAX_TEXT} value=${written[verb]} onInput=${(event) => setWritten({ ...written, [verb]: event.target.value })}></textarea></label>`}
        ${isFitting && fileKinds.length > 0 && html`<${Files} files=${files} takes=${fileKinds} onChange=${setFiles} />`}
        ${isFitting &&
        verb === "extract" &&
        html`${HAS_LABELS.includes(doing) &&
          html`<label class="field"><span>${doing === "relations" ? "Relations" : "Labels"} <em>separated by commas</em></span>
            <input maxlength=${MAX_LINE} value=${labels[doing]} onInput=${(event) => setLabels({ ...labels, [doing]: event.target.value })} /></label>`}
          ${doing === "relations" && html`<label class="field"><span>Entity labels <em>separated by commas</em></span><input maxlength=${MAX_LINE} value=${kinds} onInput=${(event) => setKinds(event.target.value)} /></label>`}
          ${doing === "structure" &&
          html`<label class="field"><span>Schema <em>JSON: entities, relations, classifications, structures</em></span>
            <textarea rows="7" class="code" spellcheck=${false} maxlength=${MAX_SCHEMA} value=${schema} onInput=${(event) => setSchema(event.target.value)}></textarea></label>`}
          ${doing === "text" && html`<label class="field"><span>Instruction <em>optional</em></span><input maxlength=${MAX_LINE} value=${instruction} onInput=${(event) => setInstruction(event.target.value)} /></label>`}
          ${doing !== "text" &&
          html`<div class="pair">
            <label class="field"><span>Threshold</span><input type="number" min="-1" max="1" step="0.05" placeholder="model default" value=${threshold} onInput=${(event) => setThreshold(event.target.value)} /></label>
            ${doing === "classify" && html`<label class="check"><input type="checkbox" checked=${multi} onChange=${(event) => setMulti(event.target.checked)} />Allow several labels</label>`}
          </div>`}`}
        ${verb === "encode" &&
        html`<div class="pair">
          <label class="field"><span>Role</span><select value=${role} onChange=${(event) => setRole(event.target.value)}><option value="document">document</option><option value="query">query</option></select></label>
          <label class="field"><span>Representation</span><select value=${form} onChange=${(event) => setForm(event.target.value)}>
            <option value="">model default</option>
            ${(card?.forms || []).map((one) => one.replace("multi_vector", "multivector")).map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
          </select></label>
        </div>`}
        ${verb === "score" &&
        html`<label class="field"><span>Compare with <em>optional</em></span><select value=${other} onChange=${(event) => setOther(event.target.value)}>
          <option value="">none</option>
          ${fitting.filter((one) => one.id !== chosen).slice(0, 300).map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}
        </select></label>`}
        <details><summary>Pool, adapter, tenant …</summary>
          <div class="pair">
            <label class="field"><span>Pool</span><input maxlength="64" value=${more.pool} placeholder="model default" onInput=${set("pool")} /></label>
            <label class="field"><span>Adapter</span><input maxlength="256" value=${more.adapter} placeholder="none" onInput=${set("adapter")} /></label>
            <label class="field"><span>Priority</span><select value=${more.priority} onChange=${set("priority")}><option value="">interactive</option><option value="bulk">bulk</option></select></label>
            <label class="field"><span>Tenant</span><input maxlength="256" value=${more.tenant} placeholder="the token's tenant" onInput=${set("tenant")} /></label>
            <label class="field"><span>Request id</span><input maxlength="128" value=${more.requestId} placeholder="generated" onInput=${set("requestId")} /></label>
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
            : answer && answer.ask.verb === verb && answer.ask.model === chosen
              ? html`<${Answer} answer=${answer} />`
              : !models.length
                ? html`<${Empty} heading="No models to try">No worker has reported a model. Enter the name of a model in a store, or check under <a href="#/mesh">Mesh</a> that workers are running.<//>`
                : html`<${Empty} heading="Run it to see the answer">${{ encode: "The vectors are compared with each other.", score: "The documents are ranked by relevance to the query.", extract: "Results are highlighted in the text." }[verb]}<//>`}
        </section>
        ${isFitting && html`<${Snippets} ask=${ask} about=${mesh.about} />`}
      </div>
    </div>
  </div>`;
}

function Answer({ answer }) {
  const { ask, content, second } = answer;
  return html`<${Timings} stages=${answer.stages} elapsed=${answer.elapsed} tokens=${content.usage?.input_tokens} />
    ${ask.verb === "encode" && html`<${Encoded} texts=${ask.names} items=${content.items} />`}
    ${ask.verb === "score" && html`<${Scored} texts=${ask.names} scores=${content.scores} other=${second?.content.scores} models=${[ask.model, second?.content.model]} />`}
    ${ask.verb === "extract" && html`<${Extracted} texts=${ask.names} items=${content.items} />`}
    <p class="small muted">request <code>${answer.requestId}</code></p>`;
}
