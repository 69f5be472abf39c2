// What models can do, by their cards, and which one a view offers first. A model without a card may do anything.

import { useRef } from "./vendor/htm-preact.js";

const FINDS = ["entities", "classify", "relations", "regions", "structure"];

export const takes = ({ card }, kind) => {
  if (!card) return true;
  return card.inputs?.length ? card.inputs.includes(kind) : kind === "text";
};

export const takesFiles = (model) => takes(model, "image") || takes(model, "document");

// Whether it answers messages: the chat view is for these.
export const writes = (model) => Boolean(model.card?.tasks?.includes("text")) && takes(model, "text");

// The tasks of Extract that can work. A model that only writes has none here: it is asked in the chat view.
export function extractTasks(model) {
  const tasks = model?.card?.tasks;
  if (!tasks?.length) return [...FINDS, "text"];
  return [...FINDS.filter((one) => tasks.includes(one)), ...(tasks.includes("text") && takesFiles(model) ? ["text"] : [])];
}

export function serves(model, verb) {
  const tasks = model.card?.tasks;
  if (!tasks?.length) return true;
  return verb === "extract" ? extractTasks(model).length > 0 : verb === "chat" ? writes(model) : tasks.includes(verb);
}

// Where a model is tried: the address of the view that suits it.
export function tryAddress(id, model) {
  const verb = model && ["encode", "score", "extract"].find((one) => serves(model, one));
  if (model && writes(model) && (!verb || verb === "extract")) return `#/chat?model=${encodeURIComponent(id)}`;
  return `#/playground?${verb ? `verb=${verb}&` : ""}model=${encodeURIComponent(id)}`;
}

// The model in use: most jobs of its lanes; else the first that is resident; else the first.
export function usual(mesh, fitting) {
  const jobs = new Map();
  for (const lane of mesh.lanes.values()) jobs.set(lane.model, (jobs.get(lane.model) || 0) + lane.enqueued);
  const rank = (model) => [jobs.get(model.id) || 0, Number(model.state === "resident")];
  const better = (one, two) => {
    const [a, b] = [rank(one), rank(two)];
    return b[0] - a[0] || b[1] - a[1] || (one.id < two.id ? -1 : 1);
  };
  return [...fitting].sort(better)[0]?.id ?? "";
}

// The same, chosen once for each `key`, so that a field does not change under the user's hands.
export function useUsual(mesh, fitting, key) {
  const chosen = useRef({});
  const known = chosen.current[key];
  if (known && fitting.some((one) => one.id === known)) return known;
  return (chosen.current[key] = usual(mesh, fitting));
}
