// openai of npm.
import OpenAI from "openai";
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
  let text = "";
  for await (const event of await client.chat.completions.create({ ...asked, stream: true })) text += event.choices[0]?.delta.content ?? "";
  assert(text === expected.written, `streamed ${text}`);
});
await check("errors", async () => {
  const error = await client.embeddings.create({ model: "gpt-4o", input: "a" }).catch((caught) => caught);
  assert(error.status === 404 && error.code === "model_not_found", `${error}`);
});
const slow = new OpenAI({ baseURL: `${limited}/v1`, apiKey: "any" });
await check("embeddings (told to wait)", () => waits(async () => {
  const { data } = await slow.embeddings.create({ model: expected.model, input: expected.texts });
  return distance(data.map((entry) => entry.embedding), expected.vectors);
}));
