// The current state of the mesh.

import { html, useRef, useState } from "../vendor/htm-preact.js";
import { useMesh } from "../mesh.js";
import { Bar, Chip, Empty, Events, Line, Memory, Words } from "../parts.js";
import { LANE_WORDS, bytes, number, plural, seconds, share, short } from "../text.js";

export function MeshView({ open }) {
  const mesh = useMesh();
  const lanes = [...mesh.lanes].map(([key, lane]) => ({ key, rate: mesh.rates.get(key) || 0, ...lane }));
  const waiting = lanes.reduce((sum, lane) => sum + lane.queued_jobs, 0);
  const oldest = Math.max(0, ...lanes.map((lane) => lane.oldest));
  const workers = [...mesh.workers.values()].sort((one, two) => (one.id < two.id ? -1 : 1));
  const rate = lanes.reduce((sum, lane) => sum + lane.rate, 0);
  const resident = [...mesh.models.values()].filter((model) => model.state === "resident").length;
  const draining = workers.filter((worker) => worker.draining).length;
  return html`<div class="view">
    <h1 class="hidden">Mesh</h1>
    <section class="figures" aria-label="Summary">
      <div class="figure wide">
        <span>Jobs per second</span><strong>${short(rate)}</strong>
        <${Line} values=${mesh.history} label="Jobs per second over the last two minutes" />
      </div>
      <div class="figure"><span>Waiting</span><strong>${short(waiting)}</strong><em>${oldest ? `oldest ${seconds(oldest)}` : "none waiting"}</em></div>
      <div class="figure">
        <span>Workers</span><strong>${workers.length}</strong
        ><em>${draining ? `${draining} draining` : plural(new Set(workers.map((one) => one.pool)).size, "pool")}</em>
      </div>
      <div class="figure"><span>Resident</span><strong>${number(resident)}</strong><em>of ${plural(mesh.models.size, "model")}</em></div>
    </section>
    <div class="columns">
      <div class="main">
        <${Lanes} lanes=${lanes} open=${open} />
        <${Workers} workers=${workers} models=${mesh.models} open=${open} />
      </div>
      <div class="side">
        <${Pools} pools=${mesh.pools} workers=${workers} scheduler=${mesh.scheduler} isFixed=${mesh.processes.size > 0} />
        <${Events} events=${mesh.events} open=${open} />
        <${Processes} processes=${[...mesh.processes.values()]} />
      </div>
    </div>
  </div>`;
}

const FEW_LANES = 12;
const ORDER_SECONDS = 5;
const byAge = (one, two) =>
  two.oldest - one.oldest || two.queued_tokens - one.queued_tokens || two.rate - one.rate || (one.key < two.key ? -1 : 1);

// Oldest first, but sorted only every few seconds: jumping rows cannot be read.
function useOrder(lanes) {
  const order = useRef({ at: 0, places: new Map() });
  const { at, places } = order.current;
  if (Date.now() - at > ORDER_SECONDS * 1000 || lanes.some((lane) => !places.has(lane.key))) {
    order.current = { at: Date.now(), places: new Map([...lanes].sort(byAge).map((lane, place) => [lane.key, place])) };
  }
  return [...lanes].sort((one, two) => order.current.places.get(one.key) - order.current.places.get(two.key));
}

function Lanes({ lanes, open }) {
  const [all, setAll] = useState(false);
  const sorted = useOrder(lanes);
  const shown = all ? sorted : sorted.slice(0, FEW_LANES);
  const most = Math.max(1, ...lanes.map((lane) => lane.queued_tokens + lane.leased_tokens));
  return html`<section class="card" aria-labelledby="lanes">
    <header><h2 id="lanes">Lanes</h2><span class="muted">${lanes.length ? "oldest first" : ""}</span></header>
    ${!lanes.length
      ? html`<${Empty} heading="No lane has work yet">A lane appears with the first request for a model. Try one in the <a href="#/playground">playground</a>.<//>`
      : html`<div class="scroll" tabindex="0" role="region" aria-label="Table of lanes"><table class="lanes">
          <thead><tr><th>Model</th><th class="load">Leased, waiting</th><th class="n">Tokens</th><th class="n">Oldest</th><th class="n">Done/s</th><th class="n">Expired, dead</th></tr></thead>
          <tbody>
            ${shown.map(
              (lane) => html`<tr key=${lane.key}>
                <td>
                  <button class="link" onClick=${() => open(lane.model)}>${lane.model}</button>
                  <span class="sub">${lane.pool}${lane.adapter && ` · ${lane.adapter}`}</span>
                </td>
                <td class="load">
                  <span class="bar double" aria-hidden="true">
                    <i class="leased" style=${{ width: `${share(lane.leased_tokens, most)}%` }}></i
                    ><i style=${{ width: `${share(lane.queued_tokens, most)}%` }}></i>
                  </span>
                  <span class="sub">${lane.queued_jobs ? `${plural(lane.queued_jobs, "job")} waiting` : "none waiting"}</span>
                </td>
                <td class="n" title="${number(lane.queued_tokens)} waiting, ${number(lane.leased_tokens)} leased">${short(lane.queued_tokens + lane.leased_tokens)}</td>
                <td class="n ${lane.oldest > 10 ? "bad" : ""}">${lane.oldest ? seconds(lane.oldest) : "–"}</td>
                <td class="n">${lane.rate ? short(lane.rate) : "–"}</td>
                <td class="n ${lane.dead ? "bad" : ""} ${lane.expired + lane.dead ? "" : "none"}" title="${number(lane.expired)} expired, ${number(lane.dead)} dead, ${number(lane.cancelled)} cancelled">
                  ${lane.expired + lane.dead ? `${number(lane.expired)}, ${number(lane.dead)}` : "–"}
                </td>
              </tr>`,
            )}
          </tbody>
        </table></div>`}
    ${lanes.length > 0 &&
    html`<ul class="legend pad"><li><i class="key leased"></i>leased</li><li><i class="key waits"></i>waiting</li></ul>
      <${Words} words=${Object.entries(LANE_WORDS)} label="Explain waiting, leased, expired and dead" />`}
    ${sorted.length > FEW_LANES &&
    html`<footer><button class="link" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${number(sorted.length)} lanes`}</button></footer>`}
  </section>`;
}

function Workers({ workers, models, open }) {
  const places = new Map(workers.map((worker) => [worker.id, []]));
  for (const model of models.values()) {
    for (const place of model.places) places.get(place.worker)?.push({ id: model.id, ...place });
  }
  return html`<section class="card" aria-labelledby="workers">
    <header><h2 id="workers">Workers</h2><span class="muted">memory by resident model</span></header>
    ${!workers.length
      ? html`<${Empty} heading="No worker has reported">
          Start one with <code>python -m services.worker</code>, or a whole mesh with <code>shoal up</code>. It appears here within a second.
        <//>`
      : html`<ul class="workers">
          ${workers.map((worker) => html`<${Worker} key=${worker.id} worker=${worker} places=${places.get(worker.id)} open=${open} />`)}
        </ul>`}
  </section>`;
}

const FEW_MODELS = 5;
const COMING = ["loading", "downloading"];

function Worker({ worker, places, open }) {
  const resident = places.filter((place) => place.state === "resident").sort((one, two) => two.bytes - one.bytes);
  const coming = places.filter((place) => COMING.includes(place.state));
  const segments = resident.map((place) => ({ name: place.id, value: place.bytes }));
  const wasted = share(worker.wasted_seconds, worker.device_seconds);
  return html`<li class="worker ${worker.age > 5 ? "old" : ""}">
    <div class="head">
      <strong>${worker.id}</strong>
      <span class="muted">${[...new Set([worker.device, worker.pool])].join(" · ")}</span>
      ${worker.preempted_in !== null && html`<${Chip} tone="bad">machine ends in ${seconds(worker.preempted_in)}<//>`}
      ${worker.draining && html`<${Chip} tone="warn">draining<//>`}
      ${worker.age > 5 && html`<${Chip} tone="bad">silent for ${seconds(worker.age)}<//>`}
      <span class="amount">${bytes(worker.used)} <span class="muted">of ${bytes(worker.memory)}</span></span>
    </div>
    <${Memory} segments=${segments} used=${worker.used} whole=${worker.memory} label="Device memory of ${worker.id}" />
    ${worker.host_memory > 0 &&
    worker.host_used > 0 &&
    html`<div class="host"><span class="muted">host memory</span><${Bar} part=${worker.host_used} whole=${worker.host_memory} /><span class="muted">${bytes(worker.host_used)}</span></div>`}
    <ul class="held">
      ${resident.slice(0, FEW_MODELS).map(
        (place, at) => html`<li key=${place.id}>
          <i class="key m${at % 4}"></i><button class="link" onClick=${() => open(place.id)}>${place.id}</button>
          <span class="muted">${bytes(place.bytes)}${place.pinned ? " · pinned" : ""}${place.leaving ? " · leaving" : ""}</span>
        </li>`,
      )}
      ${coming.map(
        (place) => html`<li key=${`coming ${place.id}`}>
          <i class="key turning"></i><button class="link" onClick=${() => open(place.id)}>${place.id}</button>
          <span class="muted">${place.download ? `downloading, ${Math.round(share(place.downloaded, place.download))} %` : "loading"}</span>
        </li>`,
      )}
      ${resident.length > FEW_MODELS && html`<li class="muted">and ${resident.length - FEW_MODELS} more</li>`}
      ${!resident.length && !coming.length && html`<li class="muted">no models</li>`}
    </ul>
    ${worker.device_seconds > 60 && wasted >= 1 && html`<p class="small muted">${wasted.toFixed(0)} % of its time was spent on cancelled requests.</p>`}
  </li>`;
}

// In a mesh of `shoal up` nothing starts workers, so the scheduler's desired number is a hint and not a warning.
function Pools({ pools, workers, scheduler, isFixed }) {
  const ready = new Map();
  for (const worker of workers) {
    if (!worker.draining) ready.set(worker.pool, (ready.get(worker.pool) || 0) + 1);
  }
  const names = [...new Set([...ready.keys(), ...pools.keys()])].sort();
  return html`<section class="card" aria-labelledby="pools">
    <header><h2 id="pools">Pools</h2></header>
    ${!names.length
      ? html`<p class="muted pad">No pool has workers.</p>`
      : html`<table class="pools">
          <thead><tr><th>Pool</th><th class="n">Ready</th><th class="n">Desired</th></tr></thead>
          <tbody>
            ${names.map((name) => {
              const wanted = pools.get(name)?.desired;
              const has = ready.get(name) || 0;
              return html`<tr key=${name}>
                <td>${name}</td><td class="n ${wanted > has && !isFixed ? "warn" : ""}">${has}</td><td class="n ${isFixed ? "muted" : ""}">${wanted ?? html`<span class="muted">–</span>`}</td>
              </tr>`;
            })}
          </tbody>
        </table>`}
    ${isFixed && pools.size > 0 && html`<p class="pad small muted fixed">Workers are not scaled here (<code>shoal up</code>): the desired number is for an autoscaler.</p>`}
    <p class="pad small scheduler">
      ${scheduler && scheduler.id
        ? html`<span class="muted">Scheduler</span> ${scheduler.id} <span class="muted">planned ${seconds(scheduler.age)} ago</span>`
        : html`<span class="muted">No scheduler leads: workers claim models themselves.</span>`}
    </p>
  </section>`;
}

function Processes({ processes }) {
  if (!processes.length) return null;
  return html`<section class="card" aria-labelledby="processes">
    <header><h2 id="processes">Processes</h2></header>
    <ul class="processes">
      ${processes.map(
        (one) => html`<li key=${one.name}>
          <i class="key ${one.state === "running" ? "good" : "bad"}"></i><span>${one.name}</span>
          <span class="muted">${one.state}${one.restarts ? ` · ${plural(one.restarts, "restart")}` : ""}</span>
          ${one.detail && html`<p class="small muted">${one.detail}</p>`}
        </li>`,
      )}
    </ul>
  </section>`;
}
