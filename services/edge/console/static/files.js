// Files of a request: selected here, checked for their size, and read as base64.

import { html, useState } from "./vendor/htm-preact.js";
import { bytes } from "./text.js";

const MAX_FILES = 8;
const MAX_FILE_BYTES = 8 << 20;
const MAX_ALL_BYTES = 24 << 20; // a third more as base64: within the edge's 64 MiB

const kindOf = (file) => (file.type === "application/pdf" || /\.pdf$/i.test(file.name) ? "document" : file.type.startsWith("image/") ? "image" : "");

const read = (file) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} could not be read.`));
    reader.readAsDataURL(file);
  });

// Return why these files cannot be sent; empty if they can. `takes`: the kinds that the model supports.
function refusal(before, chosen, takes) {
  if (before.length + chosen.length > MAX_FILES) return `At most ${MAX_FILES} files are allowed.`;
  for (const file of chosen) {
    const kind = kindOf(file);
    if (!kind) return `${file.name} is neither an image nor a PDF.`;
    if (!takes.includes(kind)) return `This model does not support ${kind === "image" ? "images" : "PDFs"}.`;
    if (!file.size) return `${file.name} is empty.`;
    if (file.size > MAX_FILE_BYTES) return `${file.name} has ${bytes(file.size)}; at most ${bytes(MAX_FILE_BYTES)} are allowed.`;
  }
  const sum = [...before, ...chosen].reduce((all, file) => all + file.size, 0);
  return sum > MAX_ALL_BYTES ? `The files have ${bytes(sum)} together; at most ${bytes(MAX_ALL_BYTES)} are allowed.` : "";
}

// `files`: [{name, kind, size, url, data}], `data` as base64.
export function Files({ files, takes, onChange }) {
  const [wrong, setWrong] = useState("");
  const add = async (event) => {
    const field = event.target;
    const chosen = [...field.files];
    field.value = "";
    const why = refusal(files, chosen, takes);
    setWrong(why);
    if (why) return;
    try {
      const urls = await Promise.all(chosen.map(read));
      const added = chosen.map((file, at) => ({ name: file.name, kind: kindOf(file), size: file.size, url: urls[at], data: urls[at].slice(urls[at].indexOf(",") + 1) }));
      onChange([...files, ...added]);
    } catch (error) {
      setWrong(error.message);
    }
  };
  const accept = [takes.includes("image") && "image/*", takes.includes("document") && "application/pdf,.pdf"].filter(Boolean).join(",");
  const what = takes.length > 1 ? "Images and PDFs" : takes[0] === "image" ? "Images" : "PDFs";
  return html`<div class="files">
    <label class="field"><span>${what} <em>at most ${MAX_FILES}, ${bytes(MAX_FILE_BYTES)} each</em></span><input type="file" multiple accept=${accept} onChange=${add} /></label>
    ${wrong && html`<p class="small bad" role="alert">${wrong}</p>`}
    ${files.length > 0 &&
    html`<ul>
      ${files.map(
        (file, at) => html`<li key=${`${at} ${file.name}`}>
          ${file.kind === "image" ? html`<img src=${file.url} alt="" />` : html`<span class="page" aria-hidden="true">PDF</span>`}
          <span class="name">${file.name}</span><span class="muted small">${bytes(file.size)}</span>
          <button type="button" class="small plain" aria-label="Remove ${file.name}" onClick=${() => onChange(files.filter((one) => one !== file))}>Remove</button>
        </li>`,
      )}
    </ul>`}
  </div>`;
}
