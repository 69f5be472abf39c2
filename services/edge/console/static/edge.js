// All requests to the edge, with this tab's token.

const TOKEN = "shoal.token";
let memory = "";

export function token() {
  try {
    return sessionStorage.getItem(TOKEN) || "";
  } catch {
    return memory;
  }
}

export function setToken(value) {
  memory = value;
  try {
    if (value) sessionStorage.setItem(TOKEN, value);
    else sessionStorage.removeItem(TOKEN);
  } catch {
    // The token is stored as long as the page is open.
  }
}

export function headers(more = {}) {
  const own = token();
  return { "x-shoal-console": "1", ...(own ? { authorization: `Bearer ${own}` } : {}), ...more };
}

// Every failure: reason, message, field, and the HTTP status (0: no response).
export class Failure extends Error {
  constructor(reason, message, field = "", requestId = "", status = 0) {
    super(message);
    Object.assign(this, { reason, field, requestId, status });
  }
}

export async function failureOf(response) {
  let content = {};
  try {
    content = await response.json();
  } catch {
    // Not JSON: a proxy's page.
  }
  const requestId = response.headers.get("x-request-id") || "";
  const { status } = response;
  const { error = {}, detail } = content;
  if (error.reason) return new Failure(error.reason, error.message, error.field, requestId, status);
  if (detail && detail.code) return new Failure(detail.code, detail.message, "", requestId, status);
  // OpenAI's errors have a code instead of a reason.
  const reason = status === 401 ? "UNAUTHENTICATED" : error.code || "";
  return new Failure(reason, error.message || `The edge answered ${status}.`, "", requestId, status);
}

export async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "same-origin", ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("NO_EDGE", "The connection to the edge failed.");
  }
  if (!response.ok) throw await failureOf(response);
  return response;
}

export const post = (path, body, more = {}, signal = undefined) =>
  send(path, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json", ...more }, signal });

export const act = async (action, model, pool = "") => (await post("/console/act", { action, model, pool })).json();

// Server-sent events over fetch: EventSource cannot send headers, and the token must be sent in one.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    let end;
    while ((end = waiting.indexOf("\n\n")) >= 0) {
      const lines = waiting.slice(0, end).split("\n");
      waiting = waiting.slice(end + 2);
      const field = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
      yield { event: field("event"), data: field("data") };
    }
  }
}

// The mesh and its changes.
export async function events(take, signal) {
  for await (const { event, data } of eventsOf(await send("/console/events", { signal }))) {
    if (event) take(event, JSON.parse(data));
  }
}

// Stream a conversation's next answer: each chunk of OpenAI's format goes to `take`. Throws a Failure if the stream is aborted.
export async function chat(body, take, signal) {
  const response = await post("/v1/chat/completions", { ...body, stream: true, stream_options: { include_usage: true } }, {}, signal);
  const requestId = response.headers.get("x-request-id") || "";
  for await (const { data } of eventsOf(response)) {
    if (data === "[DONE]") return requestId;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(chunk.error.reason || chunk.error.code || "", chunk.error.message, chunk.error.param || "", requestId);
    take(chunk);
  }
  throw new Failure("NO_EDGE", "The connection to the edge was lost before the answer was complete.", "", requestId);
}

// The last hour and the last requests through this edge.
export const past = async () => (await send("/console/history")).json();

// The newest batches of the tenant of this tab's token, by the API that clients use.
export const batches = async (limit) => (await send(`/v1/batches?limit=${limit}`)).json();

// The newest submitted jobs of this tenant.
export const jobs = async (limit) => (await send(`/v1/jobs?limit=${limit}`)).json();
