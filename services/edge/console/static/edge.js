// All requests to the edge, with the token of this tab.

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
    // It lives as long as the page.
  }
}

export function headers(more = {}) {
  const own = token();
  return { "x-shoal-console": "1", ...(own ? { authorization: `Bearer ${own}` } : {}), ...more };
}

// What every failure becomes: reason, message, field.
export class Failure extends Error {
  constructor(reason, message, field = "", requestId = "") {
    super(message);
    Object.assign(this, { reason, field, requestId });
  }
}

export async function failureOf(response) {
  let told = {};
  try {
    told = await response.json();
  } catch {
    // Not JSON: a proxy's page.
  }
  const requestId = response.headers.get("x-request-id") || "";
  const { error = {}, detail } = told;
  if (error.reason) return new Failure(error.reason, error.message, error.field, requestId);
  if (detail && detail.code) return new Failure(detail.code, detail.message, "", requestId);
  return new Failure(error.code || "", error.message || `The edge answered ${response.status}.`, "", requestId);
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

// Server-sent events over fetch: EventSource can send no header, and a token belongs into none but a header.
export async function events(take, signal) {
  const response = await send("/console/events", { signal });
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
      if (field("event")) take(field("event"), JSON.parse(field("data")));
    }
  }
}
