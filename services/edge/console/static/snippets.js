// The request of the playground or the chat as code and shell commands. Pure. Tokens are read from a variable and never shown;
// files appear by name only.

const shell = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;

// A verbatim Python expression.
class Expression {
  constructor(text) {
    this.text = text;
  }
}

// A Python literal: lists on one line, objects as dicts.
function py(value) {
  if (value instanceof Expression) return value.text;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(py).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${py(key)}: ${py(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

const pretty = (value) => JSON.stringify(value, null, 2);

// `ask` is {verb, model, texts, files, query, role, forms, task, labels, relations, threshold, multi, schema, instruction, pool,
// adapter, priority, tenant}, or for a chat {verb, model, messages, system, temperature, maxTokens, schema}. `dataOf` returns a file's base64.
export function body(ask, dataOf = (file) => file.data) {
  return ask.verb === "chat" ? chatBody(ask) : verbBody(ask, dataOf);
}

function chatBody(ask) {
  const system = ask.system ? [{ role: "system", content: ask.system }] : [];
  return {
    model: ask.model,
    messages: [...system, ...ask.messages],
    ...(ask.temperature !== null ? { temperature: ask.temperature } : {}),
    ...(ask.maxTokens !== null ? { max_tokens: ask.maxTokens } : {}),
    ...(ask.schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema: ask.schema } } } : {}),
  };
}

function itemsOf(ask, dataOf) {
  const files = ask.files.map((file) =>
    file.kind === "document" ? { document: { data: dataOf(file), format: "pdf" } } : { images: [{ data: dataOf(file) }] },
  );
  return [...ask.texts.map((text) => ({ text })), ...files];
}

function verbBody(ask, dataOf) {
  const items = itemsOf(ask, dataOf);
  const common = { ...(ask.pool ? { pool: ask.pool } : {}), ...(ask.priority ? { priority: ask.priority } : {}) };
  const adapter = ask.adapter ? { lora_id: ask.adapter } : {};
  if (ask.verb === "score") return { query: { text: ask.query }, items, ...(ask.adapter ? { options: adapter } : {}), ...common };
  if (ask.verb === "encode") {
    const options = { ...(ask.role ? { is_query: ask.role === "query" } : {}), ...adapter };
    const params = { ...(ask.forms.length ? { output_types: ask.forms } : {}), ...(Object.keys(options).length ? { options } : {}) };
    return { items, ...(Object.keys(params).length ? { params } : {}), ...common };
  }
  return { items, params: extractParams(ask, adapter), ...common };
}

function extractParams(ask, adapter) {
  const options = {
    ...(ask.threshold !== null && ask.task !== "text" ? { threshold: ask.threshold } : {}),
    task: ask.task,
    ...(ask.task === "classify" ? { classification_type: ask.multi ? "multi-label" : "single-label" } : {}),
    ...(ask.task === "relations" ? { relation_labels: ask.relations } : {}),
    ...adapter,
  };
  if (ask.task === "structure") return { output_schema: ask.schema || {}, options };
  if (ask.task === "text") return { ...(ask.instruction ? { instruction: ask.instruction } : {}), options };
  return { ...(ask.labels.length ? { labels: ask.labels } : {}), options };
}

const encodedPath = (model) => model.split("/").map(encodeURIComponent).join("/");

export const path = (ask) => (ask.verb === "chat" ? "/v1/chat/completions" : `/v1/${ask.verb}/${encodedPath(ask.model)}`);

// Return whether OpenAI's embeddings API can express the request.
const isOpenaiEncode = (ask) =>
  ask.verb === "encode" && !ask.files.length && (!ask.forms.length || (ask.forms.length === 1 && ask.forms[0] === "dense")) && !ask.adapter && !ask.pool && !ask.priority;

const embeddings = (ask) => ({ model: ask.model, input: ask.texts, role: ask.role || "document" });

// The most common format is first: OpenAI's for Encode.
export function kindsOf(ask) {
  if (ask.verb === "chat") return ["curl", "openai"];
  const kinds = ["curl", "openai", "shoal", ...(ask.verb === "extract" && ask.task === "structure" ? [] : ["grpcurl"])];
  return isOpenaiEncode(ask) ? ["OpenAI curl", ...kinds] : kinds;
}

export function snippet(kind, ask, { origin, router, hasToken }) {
  if (kind === "OpenAI curl") return curl("/v1/embeddings", embeddings(ask), ask, origin, hasToken);
  if (kind === "curl") return curl(path(ask), body(ask, marked(ask)), ask, origin, hasToken);
  if (kind === "openai") return openai(ask, origin, hasToken);
  if (kind === "shoal") return shoal(ask, router, hasToken);
  return grpcurl(ask, router, hasToken);
}

// A placeholder for a file in JSON, to be replaced by the shell command that reads it: private-use characters and a number.
const mark = (at) => `\uE000${at}\uE000`;
const marked = (ask) => (file) => mark((ask.files || []).indexOf(file));

// The JSON as an argument, or with files as a here-document in which the shell substitutes commands.
function given(text, files, flag, document) {
  if (!files?.length) return [flag(shell(text)), ""];
  let escaped = text.replace(/[\\$`]/g, "\\$&");
  files.forEach((file, at) => (escaped = escaped.replaceAll(mark(at), `$(base64 -w0 ${shell(file.name)})`)));
  return [document, ` <<END\n${escaped}\nEND`];
}

function curl(where, content, ask, origin, hasToken) {
  const lines = [`curl -s ${origin}${where}`, `-H 'content-type: application/json'`];
  if (hasToken) lines.push(`-H "authorization: Bearer $SHOAL_TOKEN"`);
  if (ask.tenant) lines.push(`-H ${shell(`x-shoal-tenant: ${ask.tenant}`)}`);
  const [argument, rest] = given(JSON.stringify(content), ask.files, (text) => `-d ${text}`, "-d @-");
  return [...lines, argument].join(" \\\n  ") + rest;
}

function openai(ask, origin, hasToken) {
  const tenant = ask.tenant ? `, default_headers={"x-shoal-tenant": ${py(ask.tenant)}}` : "";
  const key = hasToken ? `os.environ["SHOAL_TOKEN"]` : `"not required"`;
  const imports = [...(ask.files?.length ? ["import base64\n"] : []), ...(hasToken ? ["import os\n"] : [])].join("");
  const head = `${imports}import openai\n\nclient = openai.OpenAI(base_url="${origin}/v1", api_key=${key}${tenant})\n`;
  if (ask.verb === "chat") {
    const fields = Object.entries(body(ask)).map(([name, value]) => `${name}=${py(value)}`).join(", ");
    return `${head}for chunk in client.chat.completions.create(${fields}, stream=True):\n    print(chunk.choices[0].delta.content or "", end="", flush=True)`;
  }
  if (isOpenaiEncode(ask)) {
    const role = `, extra_body={"role": ${py(ask.role || "document")}}`;
    return `${head}answer = client.embeddings.create(model=${py(ask.model)}, input=${py(ask.texts)}${role})\nprint(answer.data[0].embedding[:4])`;
  }
  // Requests that OpenAI's API cannot express use the edge's path with the same client.
  const dataOf = (file) => new Expression(`base64.b64encode(open(${py(file.name)}, "rb").read()).decode()`);
  return `${head}answer = client.post(${py(path(ask).replace("/v1", ""))}, cast_to=object, body=${py(body(ask, dataOf))})\nprint(answer)`;
}

function shoal(ask, router, hasToken) {
  const more = (names) => names.filter(([, value]) => value).map(([name, value]) => `, ${name}=${py(value)}`).join("");
  const common = [["adapter", ask.adapter], ["pool", ask.pool], ["priority", ask.priority]];
  const imports = [...(hasToken ? ["import os\n"] : []), ...(ask.files.length ? ["from pathlib import Path\n"] : [])].join("");
  const head = `${imports}import shoal\n\nclient = shoal.Client(${py(router)}${hasToken ? `, token=os.environ["SHOAL_TOKEN"]` : ""}${ask.tenant ? `, tenant=${py(ask.tenant)}` : ""})\n`;
  const fileOf = (file) => new Expression(file.kind === "document" ? `shoal.Document(Path(${py(file.name)}))` : `Path(${py(file.name)})`);
  const items = py([...ask.texts, ...ask.files.map(fileOf)]);
  if (ask.verb === "encode") {
    const forms = ask.forms.map((form) => (form === "multivector" ? "multi_vector" : form));
    const call = `client.encode(${py(ask.model)}, ${items}, role=${py(ask.role || "document")}${forms.length ? `, representations=${py(forms)}` : ""}${more(common)})`;
    return `${head}answer = ${call}\nprint(answer.timings)`;
  }
  if (ask.verb === "score") return `${head}answer = client.score(${py(ask.model)}, ${py(ask.query)}, ${items}${more(common)})\nprint(answer.ranking, answer.scores)`;
  const threshold = ask.threshold !== null ? `, threshold=${ask.threshold}` : "";
  const tasks = {
    entities: `shoal.Entities(labels=${py(ask.labels)}${threshold})`,
    classify: `shoal.Classify(labels=${py(ask.labels)}, multi_label=${ask.multi ? "True" : "False"}${threshold})`,
    relations: `shoal.Relations(labels=${py(ask.relations)}, entity_labels=${py(ask.labels)}${threshold})`,
    regions: `shoal.Regions(labels=${py(ask.labels)}${threshold})`,
    structure: `shoal.Schema.from_dict(${py(ask.schema || {})})`,
    text: `shoal.ReadText(kind="ocr"${ask.instruction ? `, instruction=${py(ask.instruction)}` : ""})`,
  };
  return `${head}answer = client.extract(${py(ask.model)}, ${items}, ${tasks[ask.task]}${more(common)})\nprint(answer)`;
}

function grpcurl(ask, router, hasToken) {
  const dataOf = marked(ask);
  const files = ask.files.map((file) => (file.kind === "document" ? { parts: [{ document: { data: dataOf(file) } }] } : { image: { data: dataOf(file) } }));
  const items = [...ask.texts.map((text) => ({ text })), ...files];
  const common = { ...(ask.adapter ? { adapter: ask.adapter } : {}), ...(ask.pool ? { pool: ask.pool } : {}), ...(ask.priority ? { priority: `PRIORITY_${ask.priority.toUpperCase()}` } : {}) };
  const threshold = ask.threshold !== null ? { threshold: ask.threshold } : {};
  const forms = ask.forms.map((form) => `REPRESENTATION_${form === "multivector" ? "MULTI_VECTOR" : form.toUpperCase()}`);
  const message = {
    encode: { model: ask.model, items, role: ask.role === "query" ? "ROLE_QUERY" : "ROLE_DOCUMENT", ...(forms.length ? { representations: forms } : {}) },
    score: { model: ask.model, query: { text: ask.query }, documents: items },
    extract: {
      model: ask.model,
      items,
      ...{
        entities: { entities: { labels: ask.labels, ...threshold } },
        classify: { classify: { labels: ask.labels, multi_label: Boolean(ask.multi), ...threshold } },
        relations: { relations: { labels: ask.relations, entity_labels: ask.labels, ...threshold } },
        regions: { regions: { labels: ask.labels, ...threshold } },
        text: { text: { kind: "KIND_OCR", ...(ask.instruction ? { instruction: ask.instruction } : {}) } },
      }[ask.task],
    },
  }[ask.verb];
  const method = { encode: "Encode", score: "Score", extract: "Extract" }[ask.verb];
  const lines = ["grpcurl -plaintext"];
  if (hasToken) lines.push(`-H "authorization: Bearer $SHOAL_TOKEN"`);
  if (ask.tenant) lines.push(`-H ${shell(`x-shoal-tenant: ${ask.tenant}`)}`);
  const [argument, rest] = given(pretty({ ...message, ...common }), ask.files, (text) => `-d ${text}`, "-d @");
  return [...lines, argument, `${router.replace(/^dns:\/\/\//, "")} shoal.v1.InferenceService/${method}`].join(" \\\n  ") + rest;
}
