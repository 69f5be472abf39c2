// The capabilities of models by their cards, and the model that a view selects first. A model without a card may support anything.

import { useRef } from "./vendor/htm-preact.js";

const FINDS = ["entities", "classify", "relations", "regions", "structure"];

export const takes = ({ card }, kind) => {
  if (!card) return true;
  return card.inputs?.length ? card.inputs.includes(kind) : kind === "text";
};

export const takesFiles = (model) => takes(model, "image") || takes(model, "document");

// Return whether the model answers messages, as the chat view requires.
export const writes = (model) => Boolean(model.card?.tasks?.includes("text")) && takes(model, "text");

// Return the supported tasks of Extract. A model that only generates text has none: it is for the chat view.
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

// Return the address of the view in which to try a model.
export function tryAddress(id, model) {
  const verb = model && ["encode", "score", "extract"].find((one) => serves(model, one));
  if (model && writes(model) && (!verb || verb === "extract")) return `#/chat?model=${encodeURIComponent(id)}`;
  return `#/playground?${verb ? `verb=${verb}&` : ""}model=${encodeURIComponent(id)}`;
}

// Return the model with the most jobs, or else the first resident one, or else the first.
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

// The same, chosen once per `key`, so that the field does not change while the user works.
export function useUsual(mesh, fitting, key) {
  const chosen = useRef({});
  const known = chosen.current[key];
  if (known && fitting.some((one) => one.id === known)) return known;
  return (chosen.current[key] = usual(mesh, fitting));
}
