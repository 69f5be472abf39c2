// The submitted jobs of the tenant of this tab's token, newest first.

import { html, useState } from "../vendor/htm-preact.js";
import { jobs, token } from "../edge.js";
import { useMesh } from "../mesh.js";
import { Bar, Empty, Problem } from "../parts.js";
import { JOB_STATES, dayAndTime, number, sentence } from "../text.js";
import { FEW, MAX_SHOWN, useNewest } from "./batches.js";

export function JobsView({ open }) {
  const [limit, setLimit] = useState(FEW);
  const [content, failure] = useNewest(jobs, limit);
  const isUnserved = failure?.status === 404;
  return html`<div class="view">
    <div class="title"><h1>Jobs</h1><span class="muted">${token() ? "of the tenant of your token" : "of the default tenant"}</span></div>
    ${isUnserved && html`<section class="card"><${Empty} heading="This edge runs no jobs">Set SHOAL_BATCHES_URL and SHOAL_JOBS_ROOTS.<//></section>`}
    ${failure && !isUnserved && html`<${Problem} failure=${failure} />`}
    ${!content && !failure && html`<p class="muted waiting" role="status">Loading the jobs …</p>`}
    ${content && !isUnserved && html`<${List} content=${content} limit=${limit} more=${() => setLimit(MAX_SHOWN)} open=${open} />`}
  </div>`;
}

function List({ content, limit, more, open }) {
  const { data, has_more: hasMore } = content;
  if (!data.length) return html`<section class="card"><${Empty} heading="No jobs">Clients submit them with <code>shoal job submit</code>.<//></section>`;
  return html`<section class="card" aria-label="Jobs, newest first">
    <table class="requests batches">
      <thead><tr><th>Submitted</th><th>Model and files</th><th>Status</th><th class="progress">Rows</th></tr></thead>
      <tbody>${data.map((one) => html`<${Job} key=${one.id} one=${one} open=${open} />`)}</tbody>
    </table>
    ${hasMore &&
    html`<footer>${limit < MAX_SHOWN
      ? html`<button class="link" onClick=${more}>Show more</button>`
      : html`<span class="muted small">These are the newest ${number(MAX_SHOWN)}. GET /v1/jobs lists the others.</span>`}</footer>`}
  </section>`;
}

function Job({ one, open }) {
  const mesh = useMesh();
  const [word, tone] = JOB_STATES[one.status] || [one.status, "idle"];
  const { rows, failed_rows: failed, total_rows: total } = one.counts;
  const { model, verb } = one.recipe;
  const rate = one.progress.rows_per_second;
  const cost = Object.values(one.cost).reduce((sum, part) => sum + part, 0);
  return html`<tr>
    <td class="at"><time>${dayAndTime(one.created_at)}</time></td>
    <td class="model">${mesh.models.has(model) ? html`<button class="link" onClick=${() => open(model)}>${model}</button>` : model}
      <span class="sub">${verb} · ${one.input}</span><span class="sub">to ${one.output}</span><span class="sub">${one.id}</span>
      ${one.error && html`<span class="sub bad">${sentence(one.error)}</span>`}</td>
    <td><span class="state ${tone}"><i></i>${word}</span></td>
    <td class="progress"><${Bar} part=${rows} whole=${total || 0} />
      <span class="small">${number(rows)} done${total === null ? "" : ` of ${number(total)}`}${rate ? ` · ${number(Math.round(rate))}/s` : ""}
        ${failed > 0 && html` · <span class="bad">${number(failed)} failed</span>`}${cost > 0 ? ` · cost ${cost.toFixed(2)}` : ""}</span></td>
  </tr>`;
}
