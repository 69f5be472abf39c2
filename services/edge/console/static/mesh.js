// This page's copy of the mesh's state: updated by the edge's events, read by the views.

import { useEffect, useState } from "./vendor/htm-preact.js";
import { Failure, events, send } from "./edge.js";

const SECTIONS = ["workers", "models", "lanes", "pools", "processes"];
const HISTORY = 120;
const MAX_EVENTS = 200;
const RATE_SECONDS = 10;

export const mesh = {
  // connecting: no data yet; live; lost: the data is old; refused: this token may not watch.
  status: "connecting",
  failure: null,
  about: { version: "", routers: [] },
  workers: new Map(),
  models: new Map(),
  lanes: new Map(),
  pools: new Map(),
  processes: new Map(),
  events: [],
  scheduler: null,
  router: "",
  rates: new Map(),
  history: [],
  seen: 0,
  // Increases when models or their workers change; the catalogue sorts again only then.
  catalogue: 0,
};

const listeners = new Set();
let frame = 0;
function tell() {
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    for (const listener of listeners) listener();
  });
}

export function useMesh() {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((value) => value + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return mesh;
}

const marks = [];

function take(name, data) {
  if (name === "about") {
    mesh.about = data;
  } else if (name === "refused") {
    throw new Failure(data.reason, data.message);
  } else if (name === "mesh") {
    show(data);
  }
  tell();
}

function show(data) {
  const first = data.full;
  if (first) {
    for (const section of SECTIONS) mesh[section] = new Map();
    mesh.events = [];
  }
  for (const section of SECTIONS) {
    for (const [key, entry] of Object.entries(data[section] || {})) mesh[section].set(key, entry);
  }
  for (const [section, key] of data.gone || []) mesh[section].delete(key);
  if (first || Object.keys(data.models || {}).length || (data.gone || []).some(([section]) => section === "models")) mesh.catalogue += 1;
  if (data.events) mesh.events = [...data.events.slice().reverse(), ...mesh.events].slice(0, MAX_EVENTS);
  if (data.scheduler) mesh.scheduler = data.scheduler;
  if (data.router) mesh.router = data.router;
  if ("problem" in data) mesh.failure = data.problem ? new Failure(data.problem.reason, data.problem.message) : null;
  const seen = Boolean(data.router);
  mesh.status = mesh.failure ? "lost" : seen || mesh.seen ? "live" : "connecting";
  if (seen && !mesh.failure) {
    mesh.seen = Date.now();
    measure();
  }
}

// Jobs per second: over the last ten seconds by lane, and over each step for the chart at the top.
function measure() {
  const now = performance.now() / 1000;
  const done = new Map([...mesh.lanes].map(([key, lane]) => [key, lane.done]));
  const last = marks[marks.length - 1];
  if (last && now - last.now < 0.5) return;
  marks.push({ now, done });
  while (marks.length > 2 && now - marks[0].now > RATE_SECONDS) marks.shift();
  const begin = marks[0];
  mesh.rates = new Map();
  for (const [key, value] of done) {
    const since = begin.done.get(key);
    const rate = since === undefined || now <= begin.now ? 0 : Math.max(0, value - since) / (now - begin.now);
    mesh.rates.set(key, rate);
  }
  if (last) {
    let step = 0;
    for (const [key, value] of done) step += Math.max(0, value - (last.done.get(key) ?? value));
    mesh.history = [...mesh.history, step / (now - last.now)].slice(-HISTORY);
  }
}

let controller = null;

// Follow the edge's events until called again with a new token.
export async function follow() {
  if (controller) controller.abort();
  const own = new AbortController();
  controller = own;
  marks.length = 0;
  let pause = 500;
  while (!own.signal.aborted) {
    try {
      await events((name, data) => {
        pause = 500;
        if (!own.signal.aborted) take(name, data);
      }, own.signal);
      if (own.signal.aborted) return;
      lost(new Failure("NO_EDGE", "The edge ended the stream."));
    } catch (error) {
      if (own.signal.aborted) return;
      const failure = error instanceof Failure ? error : new Failure("NO_EDGE", "The connection to the edge was lost.");
      if (failure.reason === "UNAUTHENTICATED" || failure.reason === "PERMISSION_DENIED") {
        mesh.status = "refused";
        mesh.failure = failure;
        await list();
        tell();
        return;
      }
      lost(failure);
    }
    tell();
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(10_000, pause * 2);
  }
}

function lost(failure) {
  mesh.status = "lost";
  mesh.failure = failure;
}

// A token that may not watch the mesh can still list models for the playground.
async function list() {
  try {
    const { data } = await (await send("/v1/models")).json();
    const words = { loaded: "resident", available: "cold" };
    mesh.models = new Map(
      data.map((model) => [
        model.id,
        {
          id: model.id,
          state: words[model.state] || model.state,
          queued: 0,
          error: model.last_error || "",
          places: [],
          card: {
            family: "", revision: "", tasks: model.tasks, forms: model.outputs.filter((form) => form !== "score"),
            dimensions: model.dims.dense || 0, token_dimensions: model.dims.multivector || 0, max_tokens: model.context_length,
            bytes: 0, data_type: "", labels: [], label_count: 0, prompts: [], pools: [], open_labels: false, given_entities: false, inputs: model.inputs || [],
          },
        },
      ]),
    );
    mesh.catalogue += 1;
  } catch {
    // The token may not list models, so none are shown.
  }
}
