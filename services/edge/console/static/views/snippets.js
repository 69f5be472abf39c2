// A view's request as code to copy.

import { html, useState } from "../vendor/htm-preact.js";
import { token } from "../edge.js";
import { Copy } from "../parts.js";
import { kindsOf, snippet } from "../snippets.js";

export function Snippets({ ask, about }) {
  const [chosen, setKind] = useState("");
  const kinds = kindsOf(ask);
  const kind = kinds.includes(chosen) ? chosen : kinds[0];
  const text = snippet(kind, ask.model ? ask : { ...ask, model: "org/name" }, { origin: location.origin, router: about.routers[0] || "localhost:50051", hasToken: Boolean(token()) });
  return html`<section class="card snippets" aria-label="The same request as code">
    <header>
      <div class="segments small" role="group" aria-label="Copy as">
        ${kinds.map((one) => html`<button key=${one} aria-pressed=${kind === one} onClick=${() => setKind(one)}>${one}</button>`)}
      </div>
      <${Copy} text=${text} />
    </header>
    <pre tabindex="0" aria-label="Request as ${kind}"><code>${text}</code></pre>
  </section>`;
}
