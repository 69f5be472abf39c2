// openai of npm.
import OpenAI, { toFile } from "openai";
import { assert, base, check, distance, expected, limited, waits } from "./checking.mjs";

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "any" });

await check("embeddings (base64 unasked)", async () => {
  const { data } = await client.embeddings.create({ model: expected.model, input: expected.texts });
  return distance(data.map((entry) => entry.embedding), expected.vectors);
});
await check("embeddings (float)", async () => {
  const { data } = await client.embeddings.create({ model: expected.model, input: expected.texts, encoding_format: "float" });
  return distance(data.map((entry) => entry.embedding), expected.vectors);
});
await check("models.retrieve (a%2Fb)", async () => { assert((await client.models.retrieve(expected.model)).id === expected.model, "id"); });
await check("chat.completions, stream", async () => {
  const { system, user, tokens } = expected.asked;
  const messages = [{ role: "system", content: system }, { role: "user", content: user }];
  const asked = { model: expected.writer, messages, max_tokens: tokens };
  assert((await client.chat.completions.create(asked)).choices[0].message.content === expected.written, "whole");
  const parts = [];
  for await (const event of await client.chat.completions.create({ ...asked, stream: true })) parts.push(event.choices[0]?.delta.content ?? "");
  assert(parts.join("") === expected.written && parts.filter((part) => part).length > 1, `streamed ${parts}`);
});
await check("errors", async () => {
  const error = await client.embeddings.create({ model: "gpt-4o", input: "a" }).catch((caught) => caught);
  assert(error.status === 404 && error.code === "model_not_found", `${error}`);
});
// Files and batches.
const endpoint = "/v1/embeddings";
const upload = async (inputs) => {
  const rows = inputs.map((input, i) => ({ custom_id: `id-${i}`, method: "POST", url: endpoint, body: { model: expected.model, input } }));
  const content = rows.map((row) => JSON.stringify(row)).join("\n");
  const file = await client.files.create({ file: await toFile(Buffer.from(content), "in.jsonl"), purpose: "batch" });
  assert((await client.files.waitForProcessing(file.id)).status === "processed", "status");
  assert((await (await client.files.content(file.id)).text()) === content, "content");
  return file.id;
};
const start = (file) =>
  client.batches.create({ input_file_id: file, endpoint, completion_window: "24h", metadata: { job: "a" } });
const ended = async (id) => {
  for (let i = 0; i < 600; i++) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((done) => setTimeout(done, 100));
  }
  throw new Error("the batch has not ended after 60 s");
};
const results = async (file) => {
  const text = await (await client.files.content(file)).text();
  return text.split("\n").filter((line) => line).map((line) => JSON.parse(line));
};
const ids = async (pages) => {
  const found = [];
  for await (const one of pages) found.push(one.id);
  return found;
};
const same = (found, wanted, what) => assert(JSON.stringify(found) === JSON.stringify(wanted), `${what}: ${JSON.stringify(found)}`);
await check("files and batches", async () => {
  const file = await upload([expected.texts, "", ...expected.texts]);
  const batch = await ended((await start(file)).id);
  const total = expected.texts.length + 2;
  same([batch.status, batch.metadata], ["completed", { job: "a" }], "batch");
  same(batch.request_counts, { total, completed: total - 1, failed: 1 }, "counts");
  const done = Object.fromEntries((await results(batch.output_file_id)).map((line) => [line.custom_id, line.response]));
  const wanted = [...Array(total).keys()].filter((i) => i !== 1).map((i) => `id-${i}`);
  same(Object.keys(done).sort(), wanted.sort(), "results");
  const failed = await results(batch.error_file_id);
  same(failed.map((line) => [line.custom_id, line.response.status_code]), [["id-1", 400]], "errors");
  for (const one of [file, batch.output_file_id, batch.error_file_id]) assert((await client.files.delete(one)).deleted, "deleted");
  const error = await client.files.retrieve(file).catch((caught) => caught);
  assert(error instanceof OpenAI.NotFoundError, `${error}`);
  return distance(done["id-0"].body.data.map((entry) => entry.embedding), expected.vectors);
});
await check("files.list and batches.list, pages of one", async () => {
  const [files, started] = [[], []];
  for (const text of ["a", "b", "c"]) {
    files.push(await upload([text]));
    started.push((await start(files.at(-1))).id);
  }
  const ours = (found, wanted) => found.filter((id) => wanted.includes(id));
  same(ours(await ids(client.files.list({ limit: 1, purpose: "batch", order: "asc" })), files), files, "files, ascending");
  same(ours(await ids(client.files.list({ limit: 1 })), files), [...files].reverse(), "files");
  same(ours(await ids(client.batches.list({ limit: 1 })), started), [...started].reverse(), "batches");
  const after = await client.batches.list({ limit: 1, after: started[2] });
  same([after.data.map((one) => one.id), after.has_more], [[started[1]], true], "a page");
  for (const id of started) same((await ended(id)).status, "completed", "status");
  for (const file of files) await client.files.delete(file);
  same(ours(await ids(client.files.list()), files), [], "files after deletion");
});
await check("batches, cancelled and failed", async () => {
  const batch = await start(await upload(Array(50).fill(expected.texts)));
  const { status } = await client.batches.cancel(batch.id);
  assert(["cancelling", "cancelled"].includes(status), status);
  const cancelled = await ended(batch.id);
  assert(cancelled.status === "cancelled" && cancelled.cancelled_at, JSON.stringify(cancelled));
  const file = await client.files.create({ file: await toFile(Buffer.from('{"custom_id": "a"}\n{'), "in.jsonl"), purpose: "batch" });
  const failed = await ended((await start(file.id)).id);
  const codes = failed.errors.data.map((error) => [error.line, error.code]);
  same([failed.status, codes], ["failed", [[1, "invalid_method"], [2, "invalid_json_line"]]], "failed");
  const error = await client.batches.cancel(failed.id).catch((caught) => caught);
  assert(error instanceof OpenAI.ConflictError, `${error}`);
  const unknown = await client.batches.create({ input_file_id: "file-none", endpoint, completion_window: "24h" }).catch((caught) => caught);
  assert(unknown instanceof OpenAI.BadRequestError && unknown.param === "input_file_id", `${unknown}`);
});
const slow = new OpenAI({ baseURL: `${limited}/v1`, apiKey: "any" });
await check("embeddings (rate limited)", () => waits(async () => {
  const { data } = await slow.embeddings.create({ model: expected.model, input: expected.texts });
  return distance(data.map((entry) => entry.embedding), expected.vectors);
}));
