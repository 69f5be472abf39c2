// What the scripts of Node share: as checking.py.
import { readFileSync } from "node:fs";

export const base = process.env.INTEROP_BASE;
export const limited = process.env.INTEROP_LIMITED;
export const expected = JSON.parse(readFileSync(process.env.INTEROP_EXPECTED, "utf8"));
export const tell = (call, difference, error = "") => console.log(JSON.stringify({ call, difference, error }));
export const check = async (name, call) => {
  try { tell(name, (await call()) ?? null); } catch (error) { tell(name, null, String(error).slice(0, 300)); }
};
export const assert = (holds, what) => { if (!holds) throw new Error(what); };
// JSON writes NaN and infinity as null, which the table would show "as expected".
export const finite = (number) => { assert(Number.isFinite(number), `the difference is ${number}`); return number; };
export const distance = (found, wanted) => {
  const shape = (rows) => [...rows].map((row) => row.length).join();
  assert(shape(found) === shape(wanted), `rows of ${shape(found)}, not ${shape(wanted)}`);
  return finite(Math.max(...[...found].map((row, i) => Math.max(...[...row].map((x, j) => Math.abs(x - wanted[i][j]))))));
};
// For clients that repeat by themselves: calls one after the other, of which only the first passes at once.
export const waits = async (call) => { await call(); await call(); return call(); };
