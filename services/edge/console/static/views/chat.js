// A conversation with a generative model. Texts are inserted as text, never as HTML.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { serves, useUsual, writes } from "../cards.js";
import { chat } from "../edge.js";
import { useMesh } from "../mesh.js";
import { Empty, Problem } from "../parts.js";
import { number, plural, seconds } from "../text.js";
import { body } from "../snippets.js";
import { schemaOf } from "./playground.js";
import { Snippets } from "./snippets.js";

// Limits of the fields and of an answer. The edge accepts 130 messages.
const MAX_MESSAGES = 64;
const MAX_TEXT = 32_000;
const MAX_SYSTEM = 16_000;
const MAX_SCHEMA = 32_000;
const MAX_TOKENS = 4096;

// Kept while other views are open, until the page is closed.
const kept = { messages: [], text: "", system: "", temperature: "", maxTokens: "512", schema: "" };

const within = (text, low, high) => text === "" || (Number(text) >= low && Number(text) <= high);

// Statistics of an answer. Tokens per second exclude the first token, and with it the time for reading the prompt.
function figures({ begin, first, last, pieces, usage }) {
  const tokens = usage?.completion_tokens ?? pieces;
  const writing = (last - first) / 1000;
  return { tokens, isExact: Boolean(usage), speed: tokens > 1 && writing > 0 ? (tokens - 1) / writing : 0, wait: first ? (first - begin) / 1000 : 0 };
}

export function ChatView({ query, go }) {
  const mesh = useMesh();
  const [model, setModel] = useState(query.model || null);
  const [state, setState] = useState(kept);
  const [running, setRunning] = useState(null);
  const [failure, setFailure] = useState(null);
  const [, again] = useState(0);
  const log = useRef();
  const answer = useRef(null);
  const alive = useRef(true);

  const change = (more) => setState((before) => Object.assign(kept, before, more) && { ...kept });
  const set = (name) => (event) => change({ [name]: event.target.value });
  const fitting = useMemo(() => [...mesh.models.values()].filter(writes), [mesh.catalogue]);
  const first = useUsual(mesh, fitting, "chat");
  const chosen = model ?? first;
  const known = mesh.models.get(chosen);
  useEffect(() => go("chat", { model }, true), [model]);
  useEffect(() => () => [(alive.current = false), answer.current?.controller.abort()], []);
  useEffect(() => {
    const box = log.current;
    if (box && box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
  });

  const [schema, wrongSchema] = state.schema.trim() ? schemaOf(state.schema) : [null, ""];
  const ask = {
    verb: "chat", model: chosen, system: state.system.trim(), temperature: state.temperature === "" ? null : Number(state.temperature),
    maxTokens: state.maxTokens === "" ? null : Number(state.maxTokens), schema,
    messages: [...state.messages.map(({ role, text }) => ({ role, content: text })), { role: "user", content: state.text.trim() || "Why do fish swim in schools?" }],
  };
  const missing = !chosen
    ? "Choose a model."
    : known && !serves(known, "chat")
      ? "This model does not generate text."
      : wrongSchema ||
        (!within(state.temperature, 0, 2) && "The temperature must be within 0 and 2.") ||
        (!within(state.maxTokens, 1, MAX_TOKENS) && `Max tokens must be within 1 and ${number(MAX_TOKENS)}.`) ||
        (state.messages.length >= MAX_MESSAGES && "This conversation has reached its maximum length: start a new one.") ||
        (!state.text.trim() && "Write a message.") ||
        "";

  const run = async () => {
    if (missing || running) return;
    const text = state.text.trim();
    const controller = new AbortController();
    const own = { role: "assistant", text: "", controller, begin: performance.now(), first: 0, last: 0, pieces: 0, usage: null, finish: "" };
    answer.current = own;
    change({ text: "" });
    setRunning({ text });
    setFailure(null);
    let frame = 0;
    const take = (chunk) => {
      if (chunk.usage) own.usage = chunk.usage;
      const [choice] = chunk.choices || [];
      if (choice?.finish_reason) own.finish = choice.finish_reason;
      if (!choice?.delta?.content) return;
      own.last = performance.now();
      own.first ||= own.last;
      own.pieces += 1;
      own.text += choice.delta.content;
      frame ||= requestAnimationFrame(() => [(frame = 0), again((value) => value + 1)]);
    };
    let problem = null;
    try {
      own.requestId = await chat(body(ask), take, controller.signal);
    } catch (error) {
      if (error.name !== "AbortError") problem = error;
    }
    own.stopped = controller.signal.aborted;
    answer.current = null;
    // Without an answer, restore the message in the input field.
    const done = own.text || own.finish ? [...kept.messages, { role: "user", text }, { ...own, controller: null, broken: Boolean(problem) }] : kept.messages;
    Object.assign(kept, { messages: done, text: done === kept.messages ? text : kept.text });
    if (!alive.current) return;
    setState({ ...kept });
    setFailure(problem);
    setRunning(null);
  };
  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) [event.preventDefault(), run()];
  };

  return html`<div class="view">
    <div class="title"><h1>Chat</h1>${state.messages.length > 0 && html`<button class="small" disabled=${Boolean(running)} onClick=${() => [change({ messages: [] }), setFailure(null)]}>New conversation</button>`}</div>
    <div class="bench talk">
      <section class="card conversation" aria-label="Conversation">
        <div class="log" ref=${log} role="log" aria-busy=${Boolean(running)} aria-label="Messages" tabindex="0">
          ${!state.messages.length &&
          !running &&
          !failure &&
          html`<${Empty} heading=${fitting.length || !mesh.models.size ? "Ask the model something" : "No generative model"}
            >${fitting.length || !mesh.models.size
              ? "The answer is streamed. The conversation is discarded when this page is closed."
              : html`No worker has reported a generative model. Enter the name of one in a store, or check <a href="#/models?task=text">Models</a>.`}<//>`}
          ${state.messages.map((one, at) => html`<${Message} key=${at} message=${one} />`)}
          ${running && html`<${Message} message=${{ role: "user", text: running.text }} /><${Message} message=${answer.current || { role: "assistant", text: "" }} isRunning=${true} />`}
          ${failure && html`<${Problem} failure=${failure} />`}
        </div>
        <form class="composer" onSubmit=${(event) => [event.preventDefault(), run()]}>
          <textarea id="search" rows="3" aria-label="Message" placeholder="Write a message" maxlength=${MAX_TEXT} value=${state.text} onInput=${set("text")} onKeyDown=${keys}></textarea>
          <div class="go">
            ${running
              ? html`<button type="button" class="danger" onClick=${() => answer.current?.controller.abort()}>Stop</button>`
              : html`<button class="primary" disabled=${Boolean(missing)}>Send</button>`}
            <span class="muted small" role="status">${running ? "generating …" : missing || html`<kbd>Enter</kbd> sends, <kbd>Shift Enter</kbd> inserts a line break`}</span>
          </div>
        </form>
      </section>
      <div class="aside">
        <section class="card form" aria-label="Settings">
          <label class="field"><span>Model</span>
            <input list="models" value=${chosen} placeholder="org/name" maxlength="256" spellcheck=${false} autocomplete="off" onInput=${(event) => setModel(event.target.value.trim())} />
            <datalist id="models">${fitting.slice(0, 300).map((one) => html`<option key=${one.id} value=${one.id} />`)}</datalist></label>
          ${known && !serves(known, "chat") && html`<p class="small">It does not generate text. <a href="#/playground?model=${encodeURIComponent(chosen)}">Try it in the playground</a>.</p>`}
          <label class="field"><span>System prompt <em>optional</em></span>
            <textarea rows="3" maxlength=${MAX_SYSTEM} value=${state.system} onInput=${set("system")}></textarea></label>
          <div class="pair">
            <label class="field"><span>Temperature</span><input type="number" min="0" max="2" step="0.1" placeholder="model default" value=${state.temperature} onInput=${set("temperature")} /></label>
            <label class="field"><span>Max tokens</span><input type="number" min="1" max=${MAX_TOKENS} step="1" placeholder="model default" value=${state.maxTokens} onInput=${set("maxTokens")} /></label>
          </div>
          <details open=${Boolean(state.schema)}><summary>Constrain the answer by a JSON schema</summary>
            <label class="field"><span class="hidden">JSON schema</span>
              <textarea rows="6" class="code" spellcheck=${false} maxlength=${MAX_SCHEMA} placeholder='{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}' value=${state.schema} onInput=${set("schema")}></textarea></label></details>
        </section>
        <${Snippets} ask=${ask} about=${mesh.about} />
      </div>
    </div>
  </div>`;
}

function Message({ message, isRunning = false }) {
  const isAnswer = message.role === "assistant";
  return html`<article class="message ${message.role}">
    <h2 class="small muted">${isAnswer ? "Model" : "You"}</h2>
    <p class="said">${message.text}${isRunning && isAnswer && html`<i class="caret" aria-hidden="true"></i>`}</p>
    ${isAnswer && message.begin && html`<p class="small muted numbers">${numbers(message, isRunning)}</p>`}
  </article>`;
}

function numbers(message, isRunning) {
  const { tokens, isExact, speed, wait } = figures(message);
  if (!message.first) return isRunning ? "waiting for the first token …" : "no text";
  return [
    `${isExact ? "" : "about "}${plural(tokens, "token")}`,
    speed > 0 && `${speed.toFixed(1)} tokens/s`,
    `first after ${seconds(wait)}`,
    message.usage && `${plural(message.usage.prompt_tokens, "token")} read`,
    message.finish === "length" && "cut at max tokens",
    message.stopped && "stopped",
    message.broken && "aborted",
  ]
    .filter(Boolean)
    .join(" · ");
}
