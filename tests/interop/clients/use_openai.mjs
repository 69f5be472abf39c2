// openai of npm.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const base = process.env.INTEROP_BASE;
const expected = JSON.parse(readFileSync(process.env.INTEROP_EXPECTED, "utf8"));
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "any" });
const tell = (call, difference, error = "") => console.log(JSON.stringify({ call, difference, error }));
const check = async (name, call) => {
  try { tell(name, (await call()) ?? null); } catch (error) { tell(name, null, String(error).slice(0, 300)); }
};
const distance = (found, wanted) => Math.max(...found.map((row, i) => Math.max(...row.map((x, j) => Math.abs(x - wanted[i][j])))));
const assert = (holds, what) => { if (!holds) throw new Error(what); };

await check("embeddings (base64 unasked)", async () => {
  const { data } = await client.embeddings.create({ model: expected.model, input: expected.texts });
  return distance(data.map((entry) => entry.embedding), expected.vectors);
});
await check("embeddings (float)", async () => {
  const { data } = await client.embeddings.create({ model: expected.model, input: expected.texts, encoding_format: "float" });
  return distance(data.map((entry) => entry.embedding), expected.vectors);
});
await check("models.retrieve (a%2Fb)", async () => { assert((await client.models.retrieve(expected.model)).id === expected.model, "id"); });
await check("errors", async () => {
  const error = await client.embeddings.create({ model: "gpt-4o", input: "a" }).catch((caught) => caught);
  assert(error.status === 404 && error.code === "model_not_found", `${error}`);
});
