// The last hour of this edge, its last requests, and the mesh's events, to analyse an incident.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { Chart } from "../chart.js";
import { past } from "../edge.js";
import { useMesh } from "../mesh.js";
import { Events, Problem } from "../parts.js";
import { STAGE_WORDS } from "../results.js";
import { clock, milliseconds, number, plural, seconds, short, title } from "../text.js";

const REFRESH_SECONDS = 10;
const SLOTS = 360;
const FEW = 50;
const STAGES = ["queue", "prepare", "wait", "forward", "finish"];
const isError = (one) => one.status >= 400 || Boolean(one.reason);

function usePast() {
  const [content, setContent] = useState(null);
  const [failure, setFailure] = useState(null);
  useEffect(() => {
    let isOver = false;
    let timer = 0;
    const look = async () => {
      try {
        const found = await past();
        if (!isOver) [setContent(found), setFailure(null)];
      } catch (error) {
        if (!isOver) setFailure(error);
      }
      if (!isOver) timer = setTimeout(look, REFRESH_SECONDS * 1000);
    };
    look();
    return () => [(isOver = true), clearTimeout(timer)];
  }, []);
  return [content, failure];
}

const rate = (values, step) => values.map((value) => (value === null ? null : value / step));

export function HistoryView({ open }) {
  const mesh = useMesh();
  const [content, failure] = usePast();
  return html`<div class="view">
    <div class="title"><h1>History</h1><span class="muted">the last hour through this edge</span></div>
    ${failure && html`<${Problem} failure=${failure} />`}
    ${!content && !failure && html`<p class="muted waiting" role="status">Loading the last hour …</p>`}
    ${content &&
    html`<${Charts} content=${content} />
      <div class="columns">
        <div class="main"><${Requests} requests=${content.requests} open=${open} /></div>
        <div class="side"><${Events} events=${mesh.events} open=${open} /></div>
      </div>`}
  </div>`;
}

function Charts({ content }) {
  const { steps, step_seconds: step, now } = content;
  const common = { slots: SLOTS, step, end: now };
  const perSecond = (value) => `${short(value)}/s`;
  return html`<div class="charts">
    <${Chart} ...${common} title="Latency" format=${(value) => seconds(value / 1000)}
      series=${[{ name: "p50", tone: "first", values: steps.p50 }, { name: "p99", tone: "second", values: steps.p99 }]} />
    <${Chart} ...${common} title="Requests" format=${perSecond}
      series=${[{ name: "all", tone: "first", values: rate(steps.requests, step) }, { name: "refused", tone: "second", values: rate(steps.refused, step) }, { name: "failed", tone: "bad", values: rate(steps.failed, step) }]} />
    <${Chart} ...${common} title="Tokens" format=${perSecond}
      series=${[{ name: "read", tone: "first", values: rate(steps.input_tokens, step) }, { name: "generated", tone: "second", values: rate(steps.output_tokens, step) }]} />
    <${Chart} ...${common} title="Jobs waiting in the mesh" format=${short}
      series=${[{ name: "queue", tone: "first", values: steps.queued }]} />
  </div>`;
}

function Requests({ requests, open }) {
  const [onlyErrors, setOnlyErrors] = useState(false);
  const [all, setAll] = useState(false);
  const fitting = onlyErrors ? requests.filter(isError) : requests;
  const shown = all ? fitting : fitting.slice(0, FEW);
  return html`<section class="card" aria-labelledby="requests">
    <header><h2 id="requests">Last requests</h2>
      <label class="check small"><input type="checkbox" checked=${onlyErrors} onChange=${(event) => setOnlyErrors(event.target.checked)} />Errors only</label></header>
    ${!shown.length
      ? html`<p class="muted pad">${requests.length ? "None of the last requests failed." : "This edge has received no requests since its start."}</p>`
      : html`<table class="requests">
          <thead><tr><th>Time</th><th>Model</th><th>Status</th><th class="n">Tokens</th><th class="stages">Duration</th></tr></thead>
          <tbody>${shown.map((one) => html`<${Request} key=${`${one.id} ${one.at}`} one=${one} open=${open} />`)}</tbody>
        </table>`}
    ${fitting.length > FEW && html`<footer><button class="link" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${number(fitting.length)}`}</button></footer>`}
    <ul class="legend pad">${[...STAGES, "mesh", "edge"].map((name) => html`<li key=${name}><i class="key ${name === "edge" ? "network" : name}"></i>${name === "edge" ? "edge and client" : STAGE_WORDS[name]}</li>`)}</ul>
  </section>`;
}

function Request({ one, open }) {
  const known = STAGES.map((name) => [name, one.stages[name] || 0]);
  const sum = known.reduce((all, [, value]) => all + value, 0);
  const total = Math.max(sum, one.stages.total || 0);
  const parts = [...known, ["mesh", total - sum], ["network", Math.max(0, one.ms - total)]];
  const tokens = one.input_tokens + one.output_tokens;
  const status = one.status === 499 ? "client disconnected" : one.status < 400 && one.reason ? "aborted" : String(one.status);
  return html`<tr>
    <td class="at"><time>${clock(one.at)}</time></td>
    <td class="model">${one.model ? html`<button class="link" onClick=${() => open(one.model)}>${one.model}</button>` : html`<span class="muted">no model</span>`}
      <span class="sub">${one.verb ? `${one.verb} · ` : ""}${one.route}</span></td>
    <td class=${isError(one) && one.status !== 499 ? "bad" : ""} title=${one.reason ? title(one.reason) : ""}>${status}${one.reason && html`<span class="sub">${one.reason}</span>`}</td>
    <td class="n" title="${plural(one.input_tokens, "token")} read, ${number(one.output_tokens)} generated">${tokens ? short(tokens) : "–"}</td>
    <td class="stages" title="request ${one.id}"><span class="stack" role="img" aria-label=${parts.map(([name, value]) => `${name} ${milliseconds(value)} ms`).join(", ")}>
      ${parts.map(([name, value]) => value > 0 && html`<i key=${name} class=${name} style=${{ flexGrow: value }} title="${name}: ${milliseconds(value)} ms"></i>`)}</span
      ><span class="n small">${seconds(one.ms / 1000)}</span></td>
  </tr>`;
}
