// The request of the playground, as programs and shells would send it. Pure. Tokens are named, never shown.

const shell = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;

// A literal of Python: lists on one line, objects as dicts.
function py(value) {
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(py).join(", ")}]`;
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, one]) => `${py(key)}: ${py(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}

const pretty = (value) => JSON.stringify(value, null, 2);

// `ask`: {verb, model, texts, query, role, forms, task, labels, relations, threshold, multi, pool, adapter, priority, tenant}
export function body(ask) {
  const items = ask.texts.map((text) => ({ text }));
  const common = { ...(ask.pool ? { pool: ask.pool } : {}), ...(ask.priority ? { priority: ask.priority } : {}) };
  const adapter = ask.adapter ? { lora_id: ask.adapter } : {};
  if (ask.verb === "score") return { query: { text: ask.query }, items, ...(ask.adapter ? { options: adapter } : {}), ...common };
  if (ask.verb === "encode") {
    const options = { ...(ask.role ? { is_query: ask.role === "query" } : {}), ...adapter };
    const params = { ...(ask.forms.length ? { output_types: ask.forms } : {}), ...(Object.keys(options).length ? { options } : {}) };
    return { items, ...(Object.keys(params).length ? { params } : {}), ...common };
  }
  const options = {
    ...(ask.threshold !== null ? { threshold: ask.threshold } : {}),
    task: ask.task,
    ...(ask.task === "classify" ? { classification_type: ask.multi ? "multi-label" : "single-label" } : {}),
    ...(ask.task === "relations" ? { relation_labels: ask.relations } : {}),
    ...adapter,
  };
  const params = { ...(ask.labels.length ? { labels: ask.labels } : {}), ...(Object.keys(options).length ? { options } : {}) };
  return { items, ...(Object.keys(params).length ? { params } : {}), ...common };
}

export const path = (ask) => `/v1/${ask.verb}/${ask.model.split("/").map(encodeURIComponent).join("/")}`;

export const KINDS = ["curl", "openai", "shoal", "grpcurl"];

export function snippet(kind, ask, { origin, router, hasToken }) {
  if (kind === "curl") return curl(ask, origin, hasToken);
  if (kind === "openai") return openai(ask, origin, hasToken);
  if (kind === "shoal") return shoal(ask, router, hasToken);
  return grpcurl(ask, router, hasToken);
}

function curl(ask, origin, hasToken) {
  const lines = [`curl -s ${origin}${path(ask)}`, `-H 'content-type: application/json'`];
  if (hasToken) lines.push(`-H "authorization: Bearer $SHOAL_TOKEN"`);
  if (ask.tenant) lines.push(`-H ${shell(`x-shoal-tenant: ${ask.tenant}`)}`);
  return [...lines, `-d ${shell(JSON.stringify(body(ask)))}`].join(" \\\n  ");
}

function openai(ask, origin, hasToken) {
  const tenant = ask.tenant ? `, default_headers={"x-shoal-tenant": ${py(ask.tenant)}}` : "";
  const key = hasToken ? `os.environ["SHOAL_TOKEN"]` : `"none is asked for"`;
  const head = `${hasToken ? "import os\n" : ""}import openai\n\nclient = openai.OpenAI(base_url="${origin}/v1", api_key=${key}${tenant})\n`;
  const dense = !ask.forms.length || (ask.forms.length === 1 && ask.forms[0] === "dense");
  if (ask.verb === "encode" && dense && !ask.adapter && !ask.pool && !ask.priority) {
    const role = `, extra_body={"role": ${py(ask.role || "document")}}`;
    return `${head}answer = client.embeddings.create(model=${py(ask.model)}, input=${py(ask.texts)}${role})\nprint(answer.data[0].embedding[:4])`;
  }
  // What OpenAI's wire has no call for goes to the edge's own path by the same client.
  return `${head}answer = client.post(${py(path(ask).replace("/v1", ""))}, cast_to=object, body=${py(body(ask))})\nprint(answer)`;
}

function shoal(ask, router, hasToken) {
  const more = (names) => names.filter(([, value]) => value).map(([name, value]) => `, ${name}=${py(value)}`).join("");
  const common = [["adapter", ask.adapter], ["pool", ask.pool], ["priority", ask.priority]];
  const head = `${hasToken ? "import os\n" : ""}import shoal\n\nclient = shoal.Client(${py(router)}${hasToken ? `, token=os.environ["SHOAL_TOKEN"]` : ""}${ask.tenant ? `, tenant=${py(ask.tenant)}` : ""})\n`;
  if (ask.verb === "encode") {
    const forms = ask.forms.map((form) => (form === "multivector" ? "multi_vector" : form));
    const call = `client.encode(${py(ask.model)}, ${py(ask.texts)}, role=${py(ask.role || "document")}${forms.length ? `, representations=${py(forms)}` : ""}${more(common)})`;
    return `${head}answer = ${call}\nprint(answer.timings)`;
  }
  if (ask.verb === "score") return `${head}answer = client.score(${py(ask.model)}, ${py(ask.query)}, ${py(ask.texts)}${more(common)})\nprint(answer.ranking, answer.scores)`;
  const threshold = ask.threshold !== null ? `, threshold=${ask.threshold}` : "";
  const tasks = {
    entities: `shoal.Entities(labels=${py(ask.labels)}${threshold})`,
    classify: `shoal.Classify(labels=${py(ask.labels)}, multi_label=${ask.multi ? "True" : "False"}${threshold})`,
    relations: `shoal.Relations(labels=${py(ask.relations)}, entity_labels=${py(ask.labels)}${threshold})`,
  };
  return `${head}answer = client.extract(${py(ask.model)}, ${py(ask.texts)}, ${tasks[ask.task]}${more(common)})\nprint(answer)`;
}

function grpcurl(ask, router, hasToken) {
  const items = ask.texts.map((text) => ({ text }));
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
      }[ask.task],
    },
  }[ask.verb];
  const method = { encode: "Encode", score: "Score", extract: "Extract" }[ask.verb];
  const lines = ["grpcurl -plaintext"];
  if (hasToken) lines.push(`-H "authorization: Bearer $SHOAL_TOKEN"`);
  if (ask.tenant) lines.push(`-H ${shell(`x-shoal-tenant: ${ask.tenant}`)}`);
  return [...lines, `-d ${shell(pretty({ ...message, ...common }))}`, `${router.replace(/^dns:\/\/\//, "")} shoal.v1.InferenceService/${method}`].join(" \\\n  ");
}
