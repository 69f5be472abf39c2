// The playground's views of an answer.

import { html, useEffect, useRef } from "./vendor/htm-preact.js";
import { Bar } from "./parts.js";
import { milliseconds, number, plural } from "./text.js";

const STAGES = ["queue", "prepare", "wait", "forward", "finish"];
export const STAGE_WORDS = {
  queue: "in the lane",
  prepare: "tokenising",
  wait: "for a batch and the device",
  forward: "on the device",
  finish: "building the answer",
  mesh: "the rest of the mesh",
  network: "edge, network and browser",
};

export const timingsOf = (header) =>
  Object.fromEntries((header || "").split(",").map((part) => part.trim().split(";dur=")).filter((pair) => pair.length === 2).map(([name, value]) => [name, Number(value)]));

export function Timings({ stages, elapsed, tokens }) {
  const known = STAGES.map((name) => [name, stages[name] || 0]);
  const sum = known.reduce((all, [, value]) => all + value, 0);
  const total = Math.max(sum, stages.total || 0);
  const all = [...known, ["mesh", total - sum], ["network", Math.max(0, elapsed - total)]];
  return html`<figure class="timings">
    <figcaption>
      <strong>${milliseconds(elapsed)} ms</strong>
      <span class="muted">${tokens ? `from click to answer · ${plural(tokens, "token")}` : "from click to answer"}</span>
    </figcaption>
    <div class="stack" role="img" aria-label=${all.map(([name, value]) => `${name} ${milliseconds(value)} ms`).join(", ")}>
      ${all.map(([name, value]) => html`<i key=${name} class=${name} style=${{ flexGrow: value }} title="${name}: ${milliseconds(value)} ms, ${STAGE_WORDS[name]}"></i>`)}
    </div>
    <ul class="legend">
      ${all.map(([name, value]) => html`<li key=${name} title=${STAGE_WORDS[name]}><i class="key ${name}"></i>${name}<b>${milliseconds(value)}</b></li>`)}
    </ul>
  </figure>`;
}

const dot = (one, two) => one.reduce((sum, value, at) => sum + value * two[at], 0);
const cosine = (one, two) => dot(one, two) / (Math.sqrt(dot(one, one) * dot(two, two)) || 1);

export function Encoded({ texts, items }) {
  const has = (form) => items.every((item) => item[form]);
  return html`${has("dense") && html`<${Dense} texts=${texts} rows=${items.map((item) => item.dense.values)} />`}
  ${has("multivector") && html`<${Tokens} texts=${texts} rows=${items.map((item) => item.multivector.values)} />`}
  ${has("sparse") && html`<${Sparse} texts=${texts} rows=${items.map((item) => item.sparse)} />`}`;
}

function Dense({ texts, rows }) {
  const first = rows[0];
  return html`<section>
    <h2>${rows.length > 1 ? "Cosine similarity" : "Vector"}</h2>
    ${rows.length > 1 &&
    html`<div class="scroll" tabindex="0" role="region" aria-label="Cosine similarity"><table class="heat">
      <caption class="hidden">Cosine similarity of each text to each other</caption>
      <thead><tr><td></td>${texts.map((text, at) => html`<th key=${at} scope="col" title=${text}>${at + 1}</th>`)}</tr></thead>
      <tbody>
        ${rows.map(
          (row, at) => html`<tr key=${at}>
            <th scope="row" title=${texts[at]}><b>${at + 1}</b><span>${texts[at]}</span></th>
            ${rows.map((other, column) => {
              const value = cosine(row, other);
              return html`<td key=${column} style=${{ "--v": (Math.max(0, value) ** 2).toFixed(3) }}>${value.toFixed(2)}</td>`;
            })}
          </tr>`,
        )}
      </tbody>
    </table></div>`}
    <p class="small muted">${number(first.length)} dimensions, the first <code>${first.slice(0, 5).map((value) => value.toFixed(4)).join(" ")}</code> …</p>
  </section>`;
}

// Late interaction: compare each token of the first text with each of the second (or of itself).
function Tokens({ texts, rows }) {
  const canvas = useRef();
  const [one, two] = [rows[0], rows[1] || rows[0]];
  const grid = one.map((row) => two.map((other) => cosine(row, other)));
  const best = grid.map((row) => Math.max(...row));
  const low = Math.min(...grid.flat());
  useEffect(() => {
    const context = canvas.current.getContext("2d");
    const style = getComputedStyle(canvas.current);
    context.clearRect(0, 0, two.length, one.length);
    context.fillStyle = style.color;
    grid.forEach((row, y) =>
      row.forEach((value, x) => {
        context.globalAlpha = (value - low) / (1 - low || 1);
        context.fillRect(x, y, 1, 1);
      }),
    );
  }, [rows]);
  return html`<section>
    <h2>Similarity by token</h2>
    <canvas ref=${canvas} width=${two.length} height=${one.length} class="grid" role="img"
      aria-label="Similarity of ${plural(one.length, "token")} of text 1 to ${plural(two.length, "token")} of text ${rows[1] ? 2 : 1}" />
    <p class="small muted">
      Down: ${plural(one.length, "token")} of text 1. Across: ${plural(two.length, "token")} of text ${rows[1] ? 2 : 1}.
      Sum of each row's maximum: <b>${best.reduce((sum, value) => sum + value, 0).toFixed(3)}</b>
    </p>
  </section>`;
}

const TERMS = 12;

function Sparse({ texts, rows }) {
  return html`<section>
    <h2>Heaviest terms</h2>
    ${rows.map((row, at) => {
      const terms = row.indices.map((index, place) => [index, row.values[place]]).sort((one, two) => two[1] - one[1]);
      return html`<div key=${at} class="terms">
        <p title=${texts[at]}><b>${at + 1}</b> ${texts[at]} <span class="muted">${plural(terms.length, "term")} of ${number(row.dims)}</span></p>
        <ol class="bars">
          ${terms.slice(0, TERMS).map(
            ([index, weight]) => html`<li key=${index}><span class="sub">${`id ${index}`}</span><${Bar} part=${weight} whole=${terms[0][1]} /><span class="n">${weight.toFixed(2)}</span></li>`,
          )}
        </ol>
      </div>`;
    })}
  </section>`;
}

export function Scored({ texts, scores, other, models }) {
  const values = scores.map((one) => one.score);
  const [low, high] = [Math.min(0, ...values), Math.max(...values)];
  const others = other && new Map(other.map((one) => [one.item_id, one]));
  const [otherLow, otherHigh] = other ? [Math.min(0, ...other.map((one) => one.score)), Math.max(...other.map((one) => one.score))] : [0, 1];
  return html`<section>
    <h2>Ranking</h2>
    ${other && html`<p class="small muted versus"><span><i class="key forward"></i>${models[0]}</span><span><i class="key other"></i>${models[1]}</span></p>`}
    <ol class="ranking">
      ${scores.map((one) => {
        const text = texts[Number(one.item_id.replace("item-", ""))];
        const second = others?.get(one.item_id);
        const moved = second ? one.rank - second.rank : 0;
        return html`<li key=${one.item_id}>
          <b class="place">${one.rank + 1}</b>
          <div>
            <p>${text}</p>
            <div class="measure"><${Bar} part=${one.score - low} whole=${high - low || 1} /><span class="n">${one.score.toFixed(3)}</span></div>
            ${second &&
            html`<div class="measure"><${Bar} tone="other" part=${second.score - otherLow} whole=${otherHigh - otherLow || 1} /><span class="n">${second.score.toFixed(3)}</span></div>
              <p class="small muted">${moved ? `${plural(Math.abs(moved), "place")} ${moved > 0 ? "higher" : "lower"} in the other model` : "the same place in the other model"}</p>`}
          </div>
        </li>`;
      })}
    </ol>
  </section>`;
}

const isEmpty = (item) => !["entities", "classifications", "relations", "objects"].some((name) => item[name]?.length) && !item.text && !item.pages && !item.data;

export function Extracted({ texts, items }) {
  const labels = [...new Set(items.flatMap((item) => item.entities.map((one) => one.label)))];
  const hue = (label) => `h${labels.indexOf(label) % 8}`;
  return html`<section>
    ${items.map(
      (item, at) => html`<div key=${at} class="extracted">
        ${item.entities.length > 0 && html`<${Spans} text=${texts[at]} entities=${item.entities} hue=${hue} />`}
        ${item.classifications.length > 0 && html`<${Classes} text=${texts[at]} classes=${item.classifications} />`}
        ${item.relations.length > 0 && html`<${Relations} relations=${item.relations} />`}
        ${item.objects?.length > 0 && html`<${Regions} name=${texts[at]} objects=${item.objects} />`}
        ${(item.text || item.pages) && html`<${Read} name=${texts[at]} item=${item} />`}
        ${item.data && html`<${Data} data=${item.data} />`}
        ${isEmpty(item) && html`<p class="text">${texts[at]}</p><p class="small muted">No results in this text.</p>`}
      </div>`,
    )}
    ${labels.length > 0 && html`<ul class="legend">${labels.map((label) => html`<li key=${label}><i class="key ${hue(label)}"></i>${label}</li>`)}</ul>`}
  </section>`;
}

// The text that a model read in an image or in a document's pages.
function Read({ name, item }) {
  return html`<h2>${name}</h2>
    ${item.text && html`<p class="said">${item.text}</p>`}
    ${(item.pages || []).map((one) => html`<div key=${one.page}><p class="small muted">page ${one.page}${one.is_text_layer ? ", from its text layer" : ""}</p><p class="said">${one.text}</p></div>`)}`;
}

const rounded = (key, value) => (typeof value === "number" ? Number(value.toFixed(4)) : value);

function Data({ data }) {
  return html`<h2>Structured result</h2><pre class="data" tabindex="0" aria-label="Structured result"><code>${JSON.stringify(data, rounded, 2)}</code></pre>`;
}

function Regions({ name, objects }) {
  return html`<h2>${name}</h2><div class="scroll" tabindex="0" role="region" aria-label="Results"><table class="relations">
    <thead><tr><th>Label</th><th>Left, top, right, bottom</th><th class="n">Score</th></tr></thead>
    <tbody>${objects.slice(0, 100).map((one, at) => html`<tr key=${at}><td>${one.label}</td><td class="muted">${one.bbox.map(Math.round).join(", ")}</td><td class="n">${one.score.toFixed(2)}</td></tr>`)}</tbody>
  </table></div>`;
}

// Offsets count code points. The widest entity at a position is highlighted; entities within it are underlined.
function Spans({ text, entities, hue }) {
  const letters = Array.from(text);
  const edges = [...new Set([0, letters.length, ...entities.flatMap((one) => [one.start, one.end])])].sort((one, two) => one - two);
  const pieces = [];
  for (let at = 0; at + 1 < edges.length; at++) {
    const [start, end] = [edges[at], edges[at + 1]];
    const over = entities.filter((one) => one.start <= start && one.end >= end).sort((one, two) => two.end - two.start - (one.end - one.start));
    pieces.push({ start, end, over });
  }
  return html`<p class="text">
    ${pieces.map(({ start, end, over }) => {
      const words = letters.slice(start, end).join("");
      if (!over.length) return words;
      const [widest, ...inner] = over;
      const summary = over.map((one) => `${one.label} ${one.score.toFixed(2)}`).join(", ");
      const marked = inner.reduce((content, one) => html`<u class=${hue(one.label)}>${content}</u>`, words);
      return html`<mark class="${hue(widest.label)} ${widest.start === start ? "first" : ""} ${widest.end === end ? "last" : ""}" title=${summary}
        >${marked}${widest.end === end && html`<small>${widest.label} ${widest.score.toFixed(2)}</small>`}</mark>`;
    })}
  </p>`;
}

function Classes({ text, classes }) {
  return html`<p class="text">${text}</p>
    <ol class="bars classes">
      ${classes.slice(0, 20).map((one) => html`<li key=${one.label}><span>${one.label}</span><${Bar} part=${Math.max(0, one.score)} whole=${1} /><span class="n">${one.score.toFixed(3)}</span></li>`)}
    </ol>`;
}

function Relations({ relations }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Results"><table class="relations">
    <thead><tr><th>From</th><th>Relation</th><th>To</th><th class="n">Score</th></tr></thead>
    <tbody>${relations.map((one, at) => html`<tr key=${at}><td>${one.head}</td><td class="muted">${one.relation}</td><td>${one.tail}</td><td class="n">${one.score.toFixed(2)}</td></tr>`)}</tbody>
  </table></div>`;
}
