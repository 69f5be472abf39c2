// The batches of OpenAI's API, newest first. The API identifies the tenant by this tab's token, so the page sees no other tenant's.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { batches, token } from "../edge.js";
import { useMesh } from "../mesh.js";
import { Bar, Empty, Problem } from "../parts.js";
import { BATCH_STATES, dayAndTime, number, plural, sentence } from "../text.js";

const REFRESH_SECONDS = 10;
export const FEW = 20;
export const MAX_SHOWN = 100;
const MAX_ERRORS = 20;
const ENDED = ["completed", "failed", "expired", "cancelled"];

// The newest objects of a list of the API, at most `limit`, and why they cannot be read.
export function useNewest(load, limit) {
  const [found, setFound] = useState({ content: null, failure: null });
  const own = token();
  useEffect(() => {
    let isOver = false;
    let timer = 0;
    const look = async () => {
      let next;
      try {
        next = { own, content: await load(limit), failure: null };
      } catch (failure) {
        next = { failure };
      }
      if (isOver) return;
      setFound((before) => (before.own === own ? { ...before, ...next } : { own, content: null, ...next }));
      timer = setTimeout(look, REFRESH_SECONDS * 1000);
    };
    look();
    return () => [(isOver = true), clearTimeout(timer)];
  }, [load, limit, own]);
  // Another token may be another tenant's, so objects of the one before are not shown.
  return found.own === own ? [found.content, found.failure] : [null, null];
}

export function BatchesView({ open }) {
  const [limit, setLimit] = useState(FEW);
  const [content, failure] = useNewest(batches, limit);
  const isUnserved = failure?.status === 404;
  return html`<div class="view">
    <div class="title"><h1>Batches</h1><span class="muted">${token() ? "of the tenant of your token" : "of the default tenant"}</span></div>
    ${isUnserved && html`<section class="card"><${Empty} heading="This edge serves no batches">It has no storage for files. Set SHOAL_BATCHES_URL.<//></section>`}
    ${failure && !isUnserved && html`<${Problem} failure=${failure} />`}
    ${!content && !failure && html`<p class="muted waiting" role="status">Loading the batches …</p>`}
    ${content && !isUnserved && html`<${List} content=${content} limit=${limit} more=${() => setLimit(MAX_SHOWN)} open=${open} />`}
  </div>`;
}

function List({ content, limit, more, open }) {
  const { data, has_more: hasMore } = content;
  if (!data.length) return html`<section class="card"><${Empty} heading="No batches">Clients start them with POST /v1/batches.<//></section>`;
  return html`<section class="card" aria-label="Batches, newest first">
    <table class="requests batches">
      <thead><tr><th>Created</th><th>Model and endpoint</th><th>Status</th><th class="progress">Requests</th></tr></thead>
      <tbody>${data.map((one) => html`<${Batch} key=${one.id} one=${one} open=${open} />`)}</tbody>
    </table>
    ${hasMore &&
    html`<footer>${limit < MAX_SHOWN
      ? html`<button class="link" onClick=${more}>Show more</button>`
      : html`<span class="muted small">These are the newest ${number(MAX_SHOWN)}. GET /v1/batches lists the others.</span>`}</footer>`}
  </section>`;
}

function Batch({ one, open }) {
  const mesh = useMesh();
  const [word, tone] = BATCH_STATES[one.status] || [one.status, "idle"];
  const { total, completed, failed } = one.request_counts;
  const model = one.model || "";
  const yet = ENDED.includes(one.status) ? "" : " yet";
  return html`<tr>
    <td class="at"><time>${dayAndTime(one.created_at)}</time></td>
    <td class="model">${mesh.models.has(model) ? html`<button class="link" onClick=${() => open(model)}>${model}</button>` : model || html`<span class="muted">no model${yet}</span>`}
      <span class="sub">${one.endpoint}</span><span class="sub">${one.id}</span>
      <${Errors} one=${one} /></td>
    <td><span class="state ${tone}"><i></i>${word}</span></td>
    <td class="progress"><${Bar} part=${completed + failed} whole=${total} />
      <span class="small">${total
        ? html`${number(completed)} done · <span class=${failed ? "bad" : ""}>${number(failed)} failed</span> · ${number(total)} in total`
        : html`<span class="muted">none counted${yet}</span>`}</span></td>
  </tr>`;
}

function Errors({ one }) {
  const found = one.errors?.data || [];
  if (!found.length && !one.error_file_id) return null;
  const count = found.length || one.request_counts.failed;
  return html`<details class="errors small"><summary>${found.length ? plural(count, "error") : plural(count, "failed request")}</summary>
    <ol>
      ${found.slice(0, MAX_ERRORS).map((error, at) => html`<li key=${at}>${error.line ? `Line ${number(error.line)}: ` : ""}${sentence(error.message)}</li>`)}
      ${found.length > MAX_ERRORS && html`<li>${`${number(found.length - MAX_ERRORS)} more.`}</li>`}
      ${one.error_file_id && html`<li>The errors of requests are in the file <code>${one.error_file_id}</code>.</li>`}
    </ol></details>`;
}
