// A small chart of one hour: lines over time, with the values at the pointer.

import { html, useState } from "./vendor/htm-preact.js";
import { clock } from "./text.js";

const WIDTH = 600;
const HEIGHT = 120;
const TOP = 6;
const TICKS = 4;

// A round number of at least `value`.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value * 0.999);
}

// Lines through adjacent values, with gaps for unknown ones. An isolated value is a point.
function pathOf(values, left, most) {
  let path = "";
  let open = false;
  values.forEach((value, at) => {
    if (value === null) open = false;
    else {
      const point = `${(left(at) * WIDTH).toFixed(1)} ${(HEIGHT - ((HEIGHT - TOP) * value) / most).toFixed(1)}`;
      const alone = !open && (values[at + 1] ?? null) === null;
      path += alone ? `M${point}h3` : `${open ? "L" : "M"}${point}`;
      open = true;
    }
  });
  return path;
}

// `series`: [{name, tone, values}], oldest first, up to the current time. The chart is `slots` values wide.
export function Chart({ title, series, slots, step, end, format }) {
  const [at, setAt] = useState(-1);
  const count = series[0].values.length;
  const left = (index) => (slots - count + index + 0.5) / slots;
  const known = series.flatMap((one) => one.values.filter((value) => value !== null));
  const most = ceiling(Math.max(0, ...known));
  const shown = at >= 0 && at < count ? at : count - 1;
  const worded = (value) => (value === null || value === undefined ? "–" : format(value));
  const move = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const index = Math.floor(((event.clientX - box.left) / box.width) * slots) - (slots - count);
    setAt(index >= 0 && index < count ? index : -1);
  };
  const peak = (values) => values.reduce((best, value) => (value !== null && (best === null || value > best) ? value : best), null);
  const summary = series.map((one) => `${one.name} now ${worded(one.values[count - 1])}, at most ${worded(peak(one.values))}`).join("; ");
  return html`<figure class="card chart">
    <figcaption>
      <h2>${title}</h2>
      <ul class="legend">${series.map((one) => html`<li key=${one.name}><i class="key ${one.tone}"></i>${one.name}<b>${worded(one.values[shown])}</b></li>`)}</ul>
      <time class="small muted">${clock(end - (count - 1 - shown) * step)}</time>
    </figcaption>
    <div class="plot">
      <span class="most small muted" aria-hidden="true">${format(most)}</span>
      <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="${title} over the last hour: ${summary}" preserveAspectRatio="none" onPointerMove=${move} onPointerLeave=${() => setAt(-1)}>
        <path class="base" d="M0 ${TOP}H${WIDTH}M0 ${(HEIGHT + TOP) / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}" />
        ${series.map((one) => html`<path key=${one.name} class="series ${one.tone}" d=${pathOf(one.values, left, most)} />`)}
        ${at >= 0 && html`<path class="pointer" d=${`M${(left(shown) * WIDTH).toFixed(1)} 0V${HEIGHT}`} />`}
      </svg>
      <div class="ticks small muted" aria-hidden="true">
        ${Array.from({ length: TICKS + 1 }, (_, tick) => html`<span key=${tick}>${tick === TICKS ? "now" : clock(end - (1 - tick / TICKS) * slots * step).slice(0, 5)}</span>`)}
      </div>
    </div>
  </figure>`;
}
