// The page frame: the view and the open drawer from the URL fragment, theme, token, shortcuts.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { setToken, token } from "./edge.js";
import { follow, useMesh } from "./mesh.js";
import { Dialog, Icon, Notices } from "./parts.js";
import { cure, seconds, sentence, title } from "./text.js";
import { BatchesView } from "./views/batches.js";
import { ChatView } from "./views/chat.js";
import { HistoryView } from "./views/history.js";
import { JobsView } from "./views/jobs.js";
import { MeshView } from "./views/mesh.js";
import { ModelDrawer, ModelsView } from "./views/models.js";
import { PlaygroundView } from "./views/playground.js";

const VIEWS = [["mesh", "Mesh", MeshView], ["history", "History", HistoryView], ["models", "Models", ModelsView], ["playground", "Playground", PlaygroundView], ["chat", "Chat", ChatView], ["batches", "Batches", BatchesView], ["jobs", "Jobs", JobsView]];
// Views for admins only, and views that work without watching the mesh.
const NEEDS_ADMIN = ["mesh", "history"];
const WITHOUT_MESH = ["playground", "chat", "batches", "jobs"];
const THEMES = [["", "system", "the system's"], ["light", "sun", "light"], ["dark", "moon", "dark"]];
// Connection failures; their titles apply to all views.
const CONNECTION_FAILURES = ["CANNOT_CONNECT", "NO_EDGE", "UNAUTHENTICATED", "PERMISSION_DENIED"];
const GOES = { gm: "mesh", gh: "history", gc: "models", gp: "playground", gt: "chat", gb: "batches", gj: "jobs" };
const KEYS = [
  ["/", "Search"],
  ["g m", "Mesh"],
  ["g h", "History"],
  ["g c", "Models (the catalogue)"],
  ["g p", "Playground"],
  ["g t", "Chat (talk)"],
  ["g b", "Batches"],
  ["g j", "Jobs"],
  ["↑ ↓", "Move through the list of models"],
  ["Enter", "Open a model"],
  ["Ctrl Enter", "Run the request"],
  ["t", "Change the theme"],
  ["?", "Show this list"],
  ["Esc", "Close the open dialog"],
];

// A URL fragment is #/view?query. `open` is the model shown in the drawer; the other parameters belong to the view.
function place() {
  const [name, rest = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const view = VIEWS.some(([known]) => known === name) ? name : "mesh";
  const { open = "", ...query } = Object.fromEntries(new URLSearchParams(rest));
  return { view, query, drawer: open };
}

function addressOf(view, query, drawer) {
  const given = new URLSearchParams(Object.entries({ ...query, open: drawer }).filter(([, value]) => value)).toString();
  return `#/${view}${given ? `?${given}` : ""}`;
}

// If `quietly`, replace the address without adding an entry to the browser's history.
function go(view, query = {}, quietly = false) {
  const hash = addressOf(view, query, quietly ? place().drawer : "");
  if (hash === location.hash) return;
  if (quietly) history.replaceState(history.state, "", hash);
  else location.hash = hash;
}

const sameView = (one, two) => one.view === two.view && addressOf("", one.query, "") === addressOf("", two.query, "");

// The current location. `epoch` increases when the address names another view or another state of this view, which resets it.
// Opening and closing a drawer keeps the view. A view that writes its state into the address does not count as navigation.
function usePlace() {
  const [where, setWhere] = useState({ ...place(), epoch: 0 });
  const address = useRef(place());
  useEffect(() => {
    const moved = () =>
      setWhere((before) => {
        const now = place();
        const stays = sameView(now, address.current);
        address.current = now;
        if (!stays) window.scrollTo(0, 0);
        return stays ? { ...before, drawer: now.drawer } : { ...now, epoch: before.epoch + 1 };
      });
    window.addEventListener("popstate", moved);
    return () => window.removeEventListener("popstate", moved);
  }, []);
  const follow = (view, query, quietly) => {
    go(view, query, quietly);
    if (quietly) address.current = place();
  };
  const open = (drawer) => {
    const { view, query } = place();
    history.pushState({ isDrawer: true }, "", addressOf(view, query, drawer));
    setWhere((before) => ({ ...before, drawer }));
  };
  // Go back to the entry before the drawer; a page that was loaded with an open drawer has none.
  const close = () => {
    if (history.state?.isDrawer) {
      history.back();
      return;
    }
    const { view, query } = place();
    history.replaceState(null, "", addressOf(view, query, ""));
    setWhere((before) => ({ ...before, drawer: "" }));
  };
  return { where, go: follow, open, close };
}

function useTheme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme || "");
  const change = () => {
    const now = document.documentElement.dataset.theme || "";
    const at = THEMES.findIndex(([name]) => name === now);
    const [next] = THEMES[(at + 1) % THEMES.length];
    if (next) document.documentElement.dataset.theme = next;
    else delete document.documentElement.dataset.theme;
    try {
      if (next) localStorage.setItem("shoal.theme", next);
      else localStorage.removeItem("shoal.theme");
    } catch {
      // The theme applies to this page only.
    }
    setTheme(next);
  };
  return [THEMES.find(([name]) => name === theme) || THEMES[0], change];
}

function Page() {
  const mesh = useMesh();
  const { where, go, open, close } = usePlace();
  const [help, setHelp] = useState(false);
  const [asksToken, setAsksToken] = useState(false);
  const [theme, changeTheme] = useTheme();
  useEffect(() => {
    document.title = `${VIEWS.find(([name]) => name === where.view)[1]} · Shoal`;
  }, [where.view]);
  const before = useRef(""); // the previous key of a two-key shortcut; the page may be rendered in between
  useEffect(() => {
    const pressed = (event) => {
      const typing = event.target.closest?.("input, textarea, select");
      if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      const { key } = event;
      const two = before.current + key;
      before.current = key === "g" ? "g" : "";
      if (key === "/") {
        event.preventDefault();
        const field = document.getElementById("search");
        if (field) field.focus();
        else [go("models"), setTimeout(() => document.getElementById("search")?.focus(), 60)];
      } else if (GOES[two]) go(GOES[two]);
      else if (key === "?") setHelp(true);
      else if (key === "t") changeTheme();
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  }, [changeTheme]);

  const [, , View] = VIEWS.find(([name]) => name === where.view);
  const isRefused = mesh.status === "refused";
  const again = isRefused ? "" : CONNECTION_FAILURES.includes(mesh.failure?.reason) ? cure(mesh.failure.reason) : "This page reconnects automatically.";
  return html`<a class="skip" href="#main" onClick=${(event) => [event.preventDefault(), document.getElementById("main").focus()]}>Skip to content</a>
    <header class="top">
      <a class="brand" href="#/mesh"><svg viewBox="0 0 34 22" aria-hidden="true"><path d="M2 7c4-5 10-5 14-1l4-3v8l-4-3C12 12 6 12 2 7zM14 16c3.500-4.300 8.500-4.300 12-.9l3.500-2.600v7L26 16.900c-3.500 3.400-8.500 3.400-12-.9z" /></svg>Shoal</a>
      <nav aria-label="Views">
        ${VIEWS.map(
          ([name, word]) => html`<a key=${name} href="#/${name}" aria-current=${where.view === name ? "page" : undefined}><${Icon} name=${name} />${word}</a>`,
        )}
      </nav>
      <div class="end">
        <${Status} />
        <button class="plain square" aria-label="Token" title="Token" onClick=${() => setAsksToken(true)}><${Icon} name="key" />${token() && html`<i class="mark"></i>`}</button>
        <button class="plain square" aria-label="Theme: ${theme[2]}" title="Theme: ${theme[2]} (t)" onClick=${changeTheme}><${Icon} name=${theme[1]} /></button>
        <button class="plain square help" aria-label="Shortcuts" title="Shortcuts (?)" onClick=${() => setHelp(true)}><${Icon} name="help" /></button>
      </div>
    </header>
    ${mesh.failure &&
    html`<div class="banner ${isRefused ? "asks" : ""}" role="alert">
      <div><strong>${CONNECTION_FAILURES.includes(mesh.failure.reason) ? title(mesh.failure.reason) : "The mesh is unavailable"}.</strong> ${sentence(mesh.failure.message)} ${again} ${mesh.seen && !isRefused ? `The data is ${seconds((Date.now() - mesh.seen) / 1000)} old.` : ""}</div>
      ${isRefused && html`<button class="primary" onClick=${() => setAsksToken(true)}>Enter a token</button>`}
    </div>`}
    <main id="main" tabindex="-1" class=${mesh.status === "lost" && mesh.seen ? "old" : ""}>
      ${NEEDS_ADMIN.includes(where.view) && isRefused
        ? html`<div class="view"><section class="card"><div class="empty"><h1>Watching the mesh requires the role admin</h1>
            <p>${cure("PERMISSION_DENIED")}</p></div></section></div>`
        : !WITHOUT_MESH.includes(where.view) && mesh.status === "connecting"
          ? html`<div class="view"><p class="muted waiting" role="status">Loading the mesh …</p></div>`
          : !WITHOUT_MESH.includes(where.view) && mesh.status === "lost" && !mesh.seen
            ? html`<div class="view"><section class="card"><div class="empty"><h1>No mesh to show</h1><p>${again}</p></div></section></div>`
            : html`<${View} key=${`${where.view} ${where.epoch}`} query=${where.query} go=${go} open=${open} />`}
    </main>
    ${where.drawer && html`<${ModelDrawer} key=${where.drawer} id=${where.drawer} onClose=${close} />`}
    ${asksToken && html`<${Token} onClose=${() => setAsksToken(false)} />`}
    ${help &&
    html`<${Dialog} kind="ask" label="Shortcuts" onClose=${() => setHelp(false)}>
      <dl class="keys">${KEYS.map(([keys, does]) => html`<div key=${keys}><dt>${keys.split(" ").map((one) => html`<kbd key=${one}>${one}</kbd>`)}</dt><dd>${does}</dd></div>`)}</dl>
      <p class="small muted">Shoal ${mesh.about.version}${mesh.router && ` · router ${mesh.router}`}</p>
    <//>`}
    <${Notices} />`;
}

function Status() {
  const mesh = useMesh();
  const [tone, word] = {
    connecting: ["warn", "connecting"],
    live: ["good", "live"],
    lost: ["bad", "not connected"],
    refused: ["warn", "no access to the mesh"],
  }[mesh.status];
  return html`<span class="state ${tone} status" role="status"><i></i><span>${word}</span></span>`;
}

function Token({ onClose }) {
  const [value, setValue] = useState(token());
  const keep = (given) => [setToken(given.trim()), follow(), onClose()];
  return html`<${Dialog} kind="ask" label="Token" onClose=${onClose}>
    <form onSubmit=${(event) => [event.preventDefault(), keep(value)]}>
      <p class="muted">The token is stored until this tab is closed and sent to the router with each request. Watching the mesh and changing models require the role admin.</p>
      <label class="field"><span>Token</span><input type="password" autocomplete="off" spellcheck=${false} autofocus value=${value} onInput=${(event) => setValue(event.target.value)} /></label>
      <footer>${token() && html`<button type="button" onClick=${() => keep("")}>Remove</button>`}<button type="button" onClick=${onClose}>Cancel</button><button class="primary">Save</button></footer>
    </form>
  <//>`;
}

follow();
render(html`<${Page} />`, document.getElementById("page"));
