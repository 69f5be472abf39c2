// cohere-ai, ollama and @huggingface/inference of npm.
import { InferenceClient } from "@huggingface/inference";
import { CohereClient, CohereClientV2 } from "cohere-ai";
import { Ollama } from "ollama";
import { assert, base, check, distance, expected, finite, limited, waits } from "./checking.mjs";

const { model, texts, vectors } = expected;
const ollama = new Ollama({ host: base });
const first = new CohereClient({ token: "any", environment: base });
const second = new CohereClientV2({ token: "any", environment: base });
const at = (path) => new InferenceClient("any", { endpointUrl: `${base}${path}` });
const labelled = (found, wanted) => {
  assert(found.length === Object.keys(wanted).length, "labels");
  return finite(Math.max(...found.map(({ label, score }) => Math.abs(score - wanted[label]))));
};

await check("cohere-ai v2.embed", async () => {
  const found = await second.embed({ model, texts, inputType: "search_document", embeddingTypes: ["float", "int8"] });
  assert(distance(found.embeddings.int8, expected.int8) === 0, "int8");
  return distance(found.embeddings.float, vectors);
});
await check("cohere-ai v1.embed", async () => {
  const found = await first.embed({ model, texts, inputType: "search_document" });
  assert(found.responseType === "embeddings_floats", found.responseType);
  return distance(found.embeddings, vectors);
});
await check("cohere-ai classify", async () => {
  const { classifications } = await first.classify({ model: expected.classifier, inputs: texts });
  const rows = classifications.map((one) => Object.entries(one.labels).map(([label, { confidence }]) => ({ label, score: confidence })));
  assert(rows.length === texts.length, "rows");
  return Math.max(...rows.map((row, i) => labelled(row, expected.classes[i])));
});
await check("cohere-ai errors", async () => {
  const error = await second.embed({ model: "nobody", texts, inputType: "search_document" }).catch((caught) => caught);
  assert(error.statusCode === 404, `${error}`);
});
await check("ollama embed", async () => distance((await ollama.embed({ model, input: texts })).embeddings, vectors));
await check("ollama embeddings", async () => distance([(await ollama.embeddings({ model, prompt: texts[0] })).embedding], expected.alone));
await check("ollama list", async () => { assert((await ollama.list()).models.some((one) => one.name === model), "the model"); });
await check("ollama errors", async () => {
  const error = await ollama.embed({ model: "nobody", input: "a" }).catch((caught) => caught);
  assert(error.status_code === 404 && typeof error.message === "string", `${error}`);
});
await check("@huggingface/inference featureExtraction", async () =>
  distance(await at(`/models/${model}/pipeline/feature-extraction`).featureExtraction({ inputs: texts }), vectors));
await check("@huggingface/inference textClassification", async () =>
  labelled(await at(`/models/${expected.classifier}`).textClassification({ inputs: texts[0] }), expected.one_class[0]));
await check("@huggingface/inference zeroShotClassification", async () => {
  const parameters = { candidate_labels: ["fish", "wood"], hypothesis_template: "About {}." };
  const found = await at(`/models/${expected.classifier}`).zeroShotClassification({ inputs: texts[0], parameters });
  return labelled(found, expected.zero_shot[0]);
});
await check("@huggingface/inference tokenClassification", async () => {
  const found = await at(`/models/${expected.tagger}`).tokenClassification({ inputs: texts[0] });
  const wanted = expected.entities[0];
  assert(found.length === wanted.length && found.every((one, i) => one.entity_group === wanted[i][0] && one.start === wanted[i][2]), "entities");
  return finite(Math.max(0, ...found.map((one, i) => Math.abs(one.score - wanted[i][1]))));
});
await check("@huggingface/inference sentenceSimilarity", async () => {
  const inputs = { source_sentence: texts[0], sentences: texts.slice(1, 3) };
  const found = await at(`/models/${model}`).sentenceSimilarity({ inputs });
  const dot = (row) => row.reduce((sum, x, i) => sum + x * vectors[0][i], 0);
  return distance([found], [vectors.slice(1, 3).map(dot)]);
});
const slow = new CohereClientV2({ token: "any", environment: limited });
await check("cohere-ai v2.embed (rate limited)", () => waits(async () => {
  const found = await slow.embed({ model, texts, inputType: "search_document", embeddingTypes: ["float"] });
  return distance(found.embeddings.float, vectors);
}));
// These two leave it to their caller.
const told = async (call, status) => {
  let wasTold = false;
  for (let i = 0; i < 10; i++) {
    try {
      const found = await call();
      if (wasTold) return found;
    } catch (error) {
      assert(status(error) === 429, `${error}`);
      wasTold = true;
      await new Promise((done) => setTimeout(done, 2000));
    }
  }
  throw new Error("no call was refused, or none passed");
};
const far = new Ollama({ host: limited });
await check("ollama embed, repeated by its caller (rate limited)", () =>
  told(async () => distance((await far.embed({ model, input: texts })).embeddings, vectors), (error) => error.status_code));
const hosted = new InferenceClient("any", { endpointUrl: `${limited}/models/${model}/pipeline/feature-extraction` });
await check("@huggingface/inference featureExtraction, repeated by its caller (rate limited)", () =>
  told(async () => distance(await hosted.featureExtraction({ inputs: texts }), vectors), (error) => error.httpResponse?.status));
