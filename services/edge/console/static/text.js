// Format numbers, times and errors as text. Pure.

const count = new Intl.NumberFormat("en-GB");

export const number = (value) => count.format(Math.round(value));

export function short(value) {
  if (value < 1000) return value < 10 && value % 1 ? value.toFixed(1) : String(Math.round(value));
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size * 0.9995) return `${trim(value / size)} ${unit}`;
  }
  return String(value);
}

const trim = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)).replace(/\.0+$/, "");

export function bytes(value) {
  if (!value) return "0 B";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) [value, at] = [value / 1024, at + 1];
  return `${at ? trim(value) : value} ${units[at]}`;
}

export function seconds(value) {
  if (value < 0.0005) return "0 s";
  if (value < 0.9995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export const milliseconds = (value) => (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0));

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export const dayAndTime = (at) => new Date(at * 1000).toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });

export const plural = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

export const share = (part, whole) => (whole > 0 ? Math.min(100, (100 * part) / whole) : 0);

const TITLES = {
  CANNOT_CONNECT: "No router answers",
  NO_EDGE: "The edge does not answer",
  UNAUTHENTICATED: "This mesh requires a token",
  PERMISSION_DENIED: "Permission denied",
  MODEL_NOT_FOUND: "Model not found",
  MODEL_UNREACHABLE: "The model's store is unreachable",
  MODEL_LOAD_FAILED: "The model could not be loaded",
  NO_CAPACITY: "No worker is available",
  PROVISIONING: "No worker is ready yet",
  QUEUE_FULL: "The queue is full",
  RATE_LIMITED: "Rate limit exceeded",
  DEADLINE_PASSED: "Deadline exceeded",
  TIMEOUT: "Request timed out",
  TASK_NOT_SUPPORTED: "This model does not support the task",
  INPUT_TOO_LONG: "The text is too long for this model",
  INVALID_INPUT: "The request is invalid",
  NOT_READY: "The edge is not ready",
  DRAINING: "The router is shutting down",
  WORKER_LOST: "The worker was lost",
};

const CURES = {
  CANNOT_CONNECT: "Check that the mesh is running. This page reconnects automatically.",
  NO_EDGE: "Check that it is running (shoal up). This page reconnects automatically.",
  UNAUTHENTICATED: "Enter a token with the key button at the top.",
  PERMISSION_DENIED: "Watching the mesh and changing models require the role admin. The playground works with the role client.",
  MODEL_NOT_FOUND: "Check the spelling of its name, or search for it under Models.",
  MODEL_UNREACHABLE: "Check the name, or give workers the model's folder or another store.",
  NO_CAPACITY: "Start a worker in its pool, or check the pool's workers under Mesh.",
  PROVISIONING: "Check under Mesh that workers are running, then try again.",
  QUEUE_FULL: "Try again in a moment.",
  RATE_LIMITED: "Try again in a moment.",
  DEADLINE_PASSED: "The first load of a model takes a while: try again.",
  TIMEOUT: "The first load of a model takes a while: try again.",
};

// The mesh's messages start in lower case and have no full stop.
export const sentence = (text) => (text ? (/^[a-z]+[ ,]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text) + (/[.!?…]$/.test(text) ? "" : ".") : "");

export const title = (reason) => TITLES[reason] || "The request failed";
export const cure = (reason) => CURES[reason] || "";

export const STATES = {
  resident: ["Resident", "good"],
  warm: ["Warm", "accent"],
  loading: ["Loading", "warn"],
  downloading: ["Downloading", "warn"],
  cold: ["Cold", "idle"],
  failed: ["Failed", "bad"],
  absent: ["Absent", "idle"],
};

export const BATCH_STATES = {
  validating: ["Validating", "accent"],
  in_progress: ["In progress", "accent"],
  finalizing: ["Finalizing", "accent"],
  completed: ["Completed", "good"],
  failed: ["Failed", "bad"],
  expired: ["Expired", "bad"],
  cancelling: ["Cancelling", "warn"],
  cancelled: ["Cancelled", "idle"],
};

export const JOB_STATES = {
  queued: ["Waiting", "idle"],
  running: ["Running", "accent"],
  paused: ["Paused", "warn"],
  completed: ["Completed", "good"],
  failed: ["Failed", "bad"],
  expired: ["Expired", "bad"],
  cancelled: ["Cancelled", "idle"],
};

// Explanations of the terms of lanes.
export const LANE_WORDS = {
  waiting: "Jobs in the lane that no worker has started.",
  leased: "Tokens that workers are processing. If a worker dies, its lease expires and the jobs return to the queue.",
  expired: "Jobs that exceeded their deadline in the queue. Their callers received an error.",
  dead: "Jobs given up after several workers died with them. Their callers received an error.",
};

export const MEANING = {
  resident: "on a worker's device: it answers immediately",
  warm: "in a worker's host memory: moving it to the device takes about a second",
  loading: "being loaded to a device",
  downloading: "being downloaded to a worker's disk",
  cold: "on a worker's disk: the first request waits until it is loaded",
  failed: "could not be loaded: open it to see the reason",
  absent: "on no worker: the first request makes one download it from its stores",
};
