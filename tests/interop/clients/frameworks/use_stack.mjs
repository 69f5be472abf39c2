// LangChain, Vercel's AI SDK and Chroma's functions of npm.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { HuggingfaceServerEmbeddingFunction } from "@chroma-core/huggingface-server";
import { OllamaEmbeddingFunction } from "@chroma-core/ollama";
import { OpenAIEmbeddings } from "@langchain/openai";
import { embed, embedMany } from "ai";
import { assert, base, check, distance, expected, limited, waits } from "./checking.mjs";

const { model, texts, vectors, alone } = expected;
const langchain = (at, name = model) =>
  new OpenAIEmbeddings({ model: name, apiKey: "any", configuration: { baseURL: `${at}/v1` }, maxRetries: 3 });
const compatible = (at) => createOpenAICompatible({ name: "shoal", baseURL: `${at}/v1`, apiKey: "any" });

await check("@langchain/openai embedDocuments", async () => distance(await langchain(base).embedDocuments(texts), vectors));
await check("@langchain/openai embedQuery", async () => distance([await langchain(base).embedQuery(texts[0])], alone));
await check("@langchain/openai (rate limited)", () =>
  waits(async () => distance(await langchain(limited).embedDocuments(texts), vectors)));
await check("@langchain/openai errors", async () => {
  const error = await langchain(base, "nobody").embedQuery("a").catch((caught) => caught);
  assert(error.status === 404, `${error}`);
});
await check("ai embedMany", async () =>
  distance((await embedMany({ model: compatible(base).embeddingModel(model), values: texts })).embeddings, vectors));
await check("ai embed", async () =>
  distance([(await embed({ model: compatible(base).embeddingModel(model), value: texts[0] })).embedding], alone));
await check("ai embedMany (rate limited)", () => waits(async () =>
  distance((await embedMany({ model: compatible(limited).embeddingModel(model), values: texts, maxRetries: 5 })).embeddings, vectors)));
await check("ai errors", async () => {
  const error = await embed({ model: compatible(base).embeddingModel("nobody"), value: "a", maxRetries: 0 }).catch((caught) => caught);
  assert(error.statusCode === 404, `${error}`);
});
await check("@chroma-core/huggingface-server", async () =>
  distance(await new HuggingfaceServerEmbeddingFunction({ url: `${base}/tei/${model}/embed` }).generate(texts), vectors));
await check("@chroma-core/ollama", async () =>
  distance(await new OllamaEmbeddingFunction({ url: base, model }).generate(texts), vectors));
