// What the scripts of Node share: as checking.py.
import { readFileSync } from "node:fs";

export const base = process.env.INTEROP_BASE;
export const limited = process.env.INTEROP_LIMITED;
export const expected = JSON.parse(readFileSync(process.env.INTEROP_EXPECTED, "utf8"));
export const tell = (call, difference, error = "") => console.log(JSON.stringify({ call, difference, error }));
export const check = async (name, call) => {
  try { tell(name, (await call()) ?? null); } catch (error) { tell(name, null, String(error).slice(0, 300)); }
};
export const distance = (found, wanted) =>
  Math.max(...found.map((row, i) => Math.max(...row.map((x, j) => Math.abs(x - wanted[i][j])))));
export const assert = (holds, what) => { if (!holds) throw new Error(what); };
// For clients that repeat by themselves: calls one after the other, of which only the first passes at once.
export const waits = async (call) => { await call(); await call(); return call(); };
