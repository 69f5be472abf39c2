// Test the console in Chromium; see __main__.py. A JavaScript error, a resource refused by the CSP, or a serious axe finding on any
// page fails the run. SHORT takes fewer screenshots and skips frame times.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";

const { TOOLS, SHOTS, CHROMIUM, ONLY, SHORT, PYTHON } = process.env;
const urls = JSON.parse(process.env.CONSOLE_URLS);
const require = createRequire(join(TOOLS, "package.json"));
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
const ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const WIDE = { width: 1360, height: 860 };
const PHONE = { width: 390, height: 844 };

const folder = mkdtempSync(join(tmpdir(), "shoal-console-"));
const context = await chromium.launchPersistentContext(folder, { executablePath: CHROMIUM, headless: true, args: ARGS, viewport: WIDE, colorScheme: "light", timeout: 120_000 });
context.setDefaultTimeout(60_000);
const faults = [];
let shots = 0;

async function open(where, hash = "", { size = WIDE, theme = "light", allows = [] } = {}) {
  const page = await context.newPage();
  await page.setViewportSize(size);
  await page.emulateMedia({ colorScheme: theme, reducedMotion: "reduce" });
  page.on("pageerror", (error) => faults.push(`${where}${hash}: ${error.stack || error}`));
  page.on("console", (message) => {
    const text = message.text();
    // Chromium logs every unsuccessful response; those that a test expects are not faults.
    if (message.type() === "error" && !(/^Failed to load resource/.test(text) && allows.some((one) => text.includes(one)))) faults.push(`${where}${hash}: ${text}`);
  });
  await page.addInitScript(() => {
    document.addEventListener("securitypolicyviolation", (event) => console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`));
  });
  const response = await page.goto(`${urls[where]}/${hash}`);
  assert.equal(response.status(), 200);
  await page.locator("main").waitFor();
  return page;
}

async function inspect(page, name) {
  // The debugger injects the script into an isolated world, to which the page's CSP does not apply.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  for (const one of violations) {
    const told = `axe in ${name}: ${one.impact} ${one.id}: ${one.help}: ${one.nodes.slice(0, 3).map((node) => `${node.target} ${node.failureSummary?.split("\n")[1] || ""}`).join(" | ")}`;
    if (one.impact === "serious" || one.impact === "critical") faults.push(told);
    else console.log(`  (${told})`);
  }
}

async function shoot(page, name, { full = false } = {}) {
  await page.screenshot({ path: join(SHOTS, `${name}.png`), fullPage: full, animations: "disabled" });
  shots += 1;
}

// Check both themes at full and phone width; no view may scroll sideways. SHORT: light at full width, dark at phone width.
async function record(page, name) {
  await inspect(page, `${name} light`);
  await shoot(page, `${name}-light`);
  await page.emulateMedia({ colorScheme: "dark", reducedMotion: "reduce" });
  if (!SHORT) {
    await inspect(page, `${name} dark`);
    await shoot(page, `${name}-dark`);
  }
  await page.setViewportSize(PHONE);
  await page.waitForTimeout(120);
  const over = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  if (over > 0) {
    const wide = await page.evaluate(() =>
      [...document.querySelectorAll("body *")].filter((one) => one.getBoundingClientRect().right > innerWidth + 1).slice(0, 4).map((one) => `${one.tagName} ${one.className}`),
    );
    faults.push(`${name} is ${over} px wider than a phone: ${wide.join(", ")}`);
  }
  // The bar of views has a fixed position, so it does not widen the document.
  const ends = await page.evaluate(() => Math.max(...[...document.querySelectorAll("nav a")].map((one) => one.getBoundingClientRect().right)));
  if (ends > PHONE.width) faults.push(`the views in ${name} end at ${ends} px on a phone`);
  await inspect(page, `${name} phone`);
  await shoot(page, `${name}-phone-dark`);
  await page.emulateMedia({ colorScheme: "light", reducedMotion: "reduce" });
  if (!SHORT) await shoot(page, `${name}-phone-light`);
  await page.setViewportSize(WIDE);
}

const has = (page, text) => page.getByText(text).first().waitFor();
// Wait for this number of elements: the page is rendered some time after a change.
const counted = (page, selector, wanted) => page.waitForFunction(([one, many]) => document.querySelectorAll(one).length === many, [selector, wanted]);
const notice = (page, text) => page.locator(".notice", { hasText: text }).waitFor();

// Scroll from end to end while the mesh changes. Measure CPU time, since wall time depends on the machine.
async function scroll(page) {
  const debug = await context.newCDPSession(page);
  await debug.send("Performance.enable", { timeDomain: "threadTicks" });
  const work = async () => {
    const { metrics } = await debug.send("Performance.getMetrics");
    return Object.fromEntries(metrics.map(({ name, value }) => [name, value * 1000]));
  };
  const before = await work();
  const slow = await page.evaluate(async () => {
    const gaps = [];
    let last = performance.now();
    const height = document.documentElement.scrollHeight;
    const begin = last;
    while (performance.now() - begin < 4000) {
      window.scrollTo(0, (((performance.now() - begin) / 4000) * height) | 0);
      await new Promise(requestAnimationFrame);
      const now = performance.now();
      gaps.push(now - last);
      last = now;
    }
    gaps.sort((one, two) => one - two);
    return { frames: gaps.length, median: gaps[gaps.length >> 1], p95: gaps[Math.floor(gaps.length * 0.95)], most: gaps[gaps.length - 1] };
  });
  const after = await work();
  const [script, style, layout] = ["ScriptDuration", "RecalcStyleDuration", "LayoutDuration"].map((name) => (after[name] - before[name]) / slow.frames);
  console.log(
    `  1,000 models: ${slow.frames} frames in 4 s (median ${slow.median.toFixed(0)} ms, which the machine's other work decides); CPU a frame: ` +
      `script ${script.toFixed(1)} ms, style ${style.toFixed(1)} ms, layout ${layout.toFixed(1)} ms`,
  );
  assert.ok(script + style + layout < 16, "the page's own work for a frame of scrolling fits into it");
  await page.evaluate(() => window.scrollTo(0, 0));
}

// Return the body that a shell passes to curl or grpcurl for a snippet. Files are in `cwd`.
function bodyOf(snippet, cwd) {
  const shows = 'curl() { case "$*" in *"-d @"*) cat;; *) while [ "$1" != -d ]; do shift; done; printf %s "$2";; esac; }; grpcurl() { curl "$@"; };';
  return JSON.parse(execFileSync("bash", ["-c", `${shows} ${snippet}`], { cwd, encoding: "utf8" }));
}

// Parse the snippet with Python without running it.
const parses = (snippet) => execFileSync(PYTHON, ["-c", "import ast, sys; ast.parse(sys.stdin.read())"], { input: snippet });

function lastHour() {
  const now = Date.now() / 1000;
  const slots = Array.from({ length: 360 }, (_, at) => at);
  const bad = (at) => at > 200 && at < 225;
  const wave = (at) => 1 + 0.4 * Math.sin(at / 17) + 0.1 * Math.sin(at * 3.7);
  const requests = slots.slice(0, 200).map((at) => ({
    at: now - at * 3, id: `request-${at}`, route: at % 3 ? "/v1/embeddings" : "/v1/chat/completions", verb: at % 3 ? "encode" : "generate",
    model: at % 3 ? "BAAI/bge-m3" : "Qwen/Qwen3-0.6B", status: at % 17 === 4 ? 503 : 200, reason: at % 17 === 4 ? "NO_CAPACITY" : "",
    ms: 20 + (at % 7) * 9, input_tokens: 31 * at, output_tokens: at % 3 ? 0 : 44,
    stages: at % 17 === 4 ? {} : { queue: 2.1, prepare: 0.4, wait: 1.2, forward: 12.6, finish: 0.3, total: 18 },
  }));
  const steps = {
    requests: slots.map((at) => Math.round(420 * wave(at) * (bad(at) ? 0.4 : 1))), refused: slots.map((at) => (at % 50 ? 0 : 9)), failed: slots.map((at) => (bad(at) ? 130 : 0)),
    input_tokens: slots.map((at) => Math.round(91_000 * wave(at))), output_tokens: slots.map((at) => Math.round(8_000 * wave(at + 9))),
    queued: slots.map((at) => (at < 60 ? null : bad(at) ? 800 + 9 * at : Math.round(20 * wave(at)))),
    p50: slots.map((at) => 14 * wave(at) * (bad(at) ? 6 : 1)), p99: slots.map((at) => 61 * wave(at + 3) * (bad(at) ? 9 : 1)),
  };
  return { step_seconds: 10, first: now - 3600, now, steps, requests };
}

// A page of batches in every state, as the API lists them. Numbers are large and names long.
function manyBatches(count, hasMore) {
  const now = Math.floor(Date.now() / 1000);
  const statuses = ["in_progress", "validating", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"];
  const data = Array.from({ length: count }, (_, at) => {
    const status = statuses[at % statuses.length];
    const total = ["validating", "failed"].includes(status) ? 0 : 50_000;
    const completed = status === "completed" ? 49_988 : total / 2;
    const errors = status === "failed" ? { object: "list", data: Array.from({ length: 25 }, (_, line) => ({ code: "invalid_json", message: "the line is not <b>JSON</b>", line: line + 1, param: null })) } : null;
    return {
      id: `batch_6a0f0000${String(at).padStart(32, "0")}`, object: "batch", endpoint: at % 3 ? "/v1/embeddings" : "/v1/chat/completions", model: total ? (at % 2 ? "BAAI/bge-m3" : "org/a-model-with-a-rather-long-name-for-a-narrow-column") : null,
      status, errors, created_at: now - at * 3600, error_file_id: status === "completed" ? `file-6a0f0000${"1".repeat(32)}` : null, request_counts: { total, completed, failed: status === "completed" ? 12 : 0 },
    };
  });
  return { object: "list", data, first_id: data[0].id, last_id: data[count - 1].id, has_more: hasMore };
}

// A page of submitted jobs in every state.
function manyJobs(count, hasMore) {
  const now = Math.floor(Date.now() / 1000);
  const statuses = ["queued", "running", "paused", "completed", "failed", "expired", "cancelled"];
  const data = Array.from({ length: count }, (_, at) => {
    const status = statuses[at % statuses.length];
    return {
      id: `job_6a0f0000${String(at).padStart(32, "0")}`, object: "job", status, error: status === "failed" ? "the input is gone <b>" : null, input: "s3://bucket/docs/**/*.parquet", output: `s3://bucket/out/${at}`,
      recipe: { verb: "encode", model: at % 2 ? "BAAI/bge-m3" : "org/a-model-with-a-rather-long-name-for-a-narrow-column" }, created_at: now - at * 3600,
      counts: { rows: status === "queued" ? 0 : 10_000_000, failed_rows: status === "completed" ? 12 : 0, total_rows: status === "queued" ? null : 20_000_000, tokens: 1, parts: 1 },
      progress: status === "running" ? { rows_per_second: 12_345.6 } : {}, cost: status === "running" ? { l4: 1.5, h100: 2 } : {},
    };
  });
  return { object: "list", data, first_id: data[0].id, last_id: data[count - 1].id, has_more: hasMore };
}

const parts = {
  async empty() {
    const page = await open("empty", "", { allows: ["503"] });
    await has(page, "No worker has reported");
    await has(page, "No lane has work yet");
    await record(page, "mesh-empty");
    await page.keyboard.press("g");
    await page.keyboard.press("c");
    await has(page, "No models yet");
    await record(page, "models-empty");
    await page.getByRole("button", { name: "Load a model by name" }).click();
    await page.getByLabel("Name").fill("org/name");
    await page.getByRole("button", { name: "Continue" }).click();
    await page.getByRole("button", { name: "Load", exact: true }).click();
    await notice(page, "there is no worker in pool default");
    await page.keyboard.press("g");
    await page.keyboard.press("p");
    await has(page, "No models to try");
    await record(page, "playground-empty");
    await page.close();
  },

  async busy() {
    const page = await open("busy");
    await page.locator(".worker").nth(3).waitFor();
    await page.locator(".figure.wide strong").filter({ hasText: /[1-9]/ }).waitFor();
    // The chart of jobs per second, from several updates.
    await page.waitForFunction((least) => document.querySelector(".figure.wide polyline")?.points.length >= least, SHORT ? 2 : 6);
    await record(page, "mesh-busy");
    await shoot(page, "mesh-busy-whole", { full: true });
    // Terms are explained, and pools that cannot scale show no warning: this mesh has processes of shoal up.
    await page.getByText("Explain waiting, leased, expired and dead").click();
    for (const word of ["waiting", "leased", "expired", "dead"]) await page.locator(".words dt", { hasText: new RegExp(`^${word}$`) }).waitFor();
    await page.locator(".pools tr", { hasText: "l4" }).waitFor();
    assert.match(await page.locator(".pools tr", { hasText: "l4" }).innerText(), /l4\s+2\s+4/);
    assert.equal(await page.locator(".pools .warn").count(), 0);
    await has(page, "Workers are not scaled here");
    await record(page, "mesh-words");
    // Two-key shortcuts, with the page rendered in between.
    await page.keyboard.press("g");
    await page.waitForTimeout(SHORT ? 150 : 700);
    await page.keyboard.press("c");
    await page.getByRole("heading", { name: "Models" }).waitFor();
    await page.keyboard.press("g");
    await page.keyboard.press("m");
    // The selected theme is kept.
    const theme = (wanted) => page.waitForFunction((one) => document.documentElement.dataset.theme === one, wanted);
    await page.keyboard.press("t");
    await page.keyboard.press("t");
    await theme("dark");
    await page.reload();
    await theme("dark");
    await page.locator(".worker").first().waitFor(); // wait for the key listener
    await page.keyboard.press("t");
    await theme(undefined);
    await page.keyboard.press("?");
    await page.getByRole("dialog", { name: "Shortcuts" }).waitFor();
    await inspect(page, "shortcuts");
    await page.keyboard.press("Escape");
    await page.getByRole("dialog").waitFor({ state: "detached" });
    await page.close();
  },

  async actions() {
    const name = "nomic-ai/nomic-embed-text-v1.5";
    const page = await open("busy", "#/models", { allows: ["502"] });
    await page.getByRole("button", { name }).waitFor();
    await record(page, "models-busy");
    await page.keyboard.press("/");
    await page.keyboard.type("nomic");
    await counted(page, ".window .row", 1);
    await page.waitForURL(/q=nomic/);
    await page.getByRole("button", { name }).press("Enter");
    const drawer = page.getByRole("dialog", { name });
    await drawer.getByText("4,200 tokens wait").first().waitFor();
    await record(page, "model-open");
    const confirm = async (button, text, said) => {
      await drawer.getByRole("button", { name: button, exact: true }).click();
      const asked = page.getByRole("dialog", { name: text });
      await asked.waitFor();
      if (button === "Evict") [await inspect(page, "confirmation"), await shoot(page, "confirmation")];
      await asked.getByRole("button", { name: button, exact: true }).click();
      await notice(page, said);
    };
    await confirm("Load", "Load this model?", "is resident on cpu-0");
    await drawer.getByText("Resident").first().waitFor();
    await confirm("Pin", "Pin this model?", "is pinned on cpu-0");
    await drawer.getByRole("button", { name: "Unpin" }).waitFor();
    await confirm("Unpin", "Unpin this model?", "may be evicted again");
    await confirm("Evict", "Evict this model?", "will unload");
    await drawer.getByText("Cold").first().waitFor();
    // Actions need confirmation.
    await drawer.getByRole("button", { name: "Load", exact: true }).click();
    await page.getByRole("dialog", { name: "Load this model?" }).waitFor();
    await page.keyboard.press("Escape");
    await page.getByRole("dialog", { name: "Load this model?" }).waitFor({ state: "detached" });
    await drawer.getByText("Cold").first().waitFor();
    await drawer.getByRole("button", { name: "Check" }).click();
    await page.keyboard.press("Escape");
    await drawer.waitFor({ state: "detached" });
    await page.evaluate(() => (location.hash = "#/mesh"));
    await page.locator(".events li", { hasText: "evicted nomic-embed-text-v1.5" }).first().waitFor();
    await page.locator(".events li", { hasText: "loaded nomic-embed-text-v1.5 in 1.4 s" }).first().waitFor();
    await record(page, "mesh-events");
    // A failed load shows its reason.
    await page.evaluate(() => (location.hash = "#/models?q=jina"));
    await page.getByRole("button", { name: "jinaai/" }).click();
    await page.getByRole("button", { name: "Load", exact: true }).click();
    await page.getByRole("dialog", { name: "Load this model?" }).getByRole("button", { name: "Load", exact: true }).click();
    await notice(page, "The model could not be loaded");
    await record(page, "model-failed");
    await page.close();
  },

  async playground() {
    // The model of the lane with the most jobs is preselected, not the first by name.
    const first = await open("busy", "#/playground");
    await first.locator(".status", { hasText: "live" }).waitFor();
    await first.waitForFunction(() => document.getElementById("search").value === "colbert-ir/colbertv2.0");
    await first.close();
    const page = await open("busy", "#/playground?verb=encode&model=BAAI%2Fbge-m3", { allows: ["502"] });
    await page.getByRole("button", { name: "Run" }).click();
    await has(page, "Cosine similarity");
    await record(page, "playground-encode");
    await shoot(page, "playground-encode-whole", { full: true });
    // OpenAI's format is first.
    assert.match(await page.locator(".snippets code").innerText(), /^curl -s \S+\/v1\/embeddings/);
    const hard = "It's 5 $HOME `ls` \\ \"quoted\"";
    await page.getByLabel(/^Texts/).fill(hard);
    for (const kind of ["openai", "shoal", "grpcurl", "curl", "OpenAI curl"]) {
      await page.getByRole("button", { name: kind, exact: true }).click();
      const text = await page.locator(".snippets code").innerText();
      assert.match(text, /BAAI/);
      if (["openai", "shoal"].includes(kind)) parses(text);
      else if (kind === "OpenAI curl") assert.deepEqual(bodyOf(text).input, [hard]);
      else assert.equal(bodyOf(text).items[0].text, hard);
    }
    await page.getByLabel("Model", { exact: true }).fill("colbert-ir/colbertv2.0");
    await page.keyboard.press("Control+Enter");
    await has(page, "Similarity by token");
    await record(page, "playground-tokens");
    await page.getByLabel("Model", { exact: true }).fill("naver/splade-v3");
    await page.keyboard.press("Control+Enter");
    await has(page, "Heaviest terms");
    await record(page, "playground-sparse");
    await page.getByRole("button", { name: "Score", exact: true }).click();
    await page.getByLabel("Compare with").selectOption("BAAI/bge-m3");
    await page.getByRole("button", { name: "Run" }).click();
    await has(page, "Ranking");
    await counted(page, ".ranking li", 4);
    await record(page, "playground-score");
    await page.getByRole("button", { name: "Extract", exact: true }).click();
    await page.getByLabel("Model", { exact: true }).fill("urchade/gliner_medium-v2.1");
    await page.getByLabel("Texts").fill("🐟🐟 Marie Curie moved from Warsaw to Paris in 1891 and worked at the Sorbonne.\nIn Paris <b>nobody</b> knew.");
    await page.getByRole("button", { name: "Run" }).click();
    await page.locator("mark", { hasText: "Sorbonne" }).waitFor();
    assert.match(await page.locator("mark").nth(1).innerText(), /^Marie/);
    await record(page, "playground-entities");
    await page.getByRole("button", { name: "Classify" }).click();
    await page.getByRole("button", { name: "Run" }).click();
    await page.locator(".classes li").first().waitFor();
    await record(page, "playground-classify");
    await page.getByRole("button", { name: "Relations" }).click();
    await page.getByRole("button", { name: "Run" }).click();
    await page.locator(".relations td").first().waitFor();
    await page.getByRole("button", { name: "Encode", exact: true }).click();
    await page.getByLabel("Model", { exact: true }).fill("jinaai/jina-embeddings-v2-base-code");
    await page.getByRole("button", { name: "Run" }).click();
    await has(page, "The model could not be loaded");
    await record(page, "playground-failed");
    await page.close();
  },

  async chat() {
    const page = await open("busy", "#/mesh");
    await page.locator(".worker").first().waitFor();
    await page.keyboard.press("g");
    await page.keyboard.press("t");
    await page.getByRole("heading", { name: "Chat" }).waitFor();
    assert.equal(await page.getByLabel("Model", { exact: true }).inputValue(), "Qwen/Qwen3-0.6B");
    await record(page, "chat-empty");
    await page.getByLabel("System prompt").fill("You know all about fish.");
    await page.getByLabel("Temperature").fill("0");
    await page.getByLabel("Max tokens").fill("300");
    const asked = page.waitForRequest((request) => request.url().endsWith("/v1/chat/completions"));
    await page.getByLabel("Message", { exact: true }).fill("Why do fish swim in schools?");
    await page.keyboard.press("Enter");
    const sent = (await asked).postDataJSON();
    assert.deepEqual([sent.stream, sent.temperature, sent.max_tokens, sent.messages[0].role, sent.messages.length], [true, 0, 300, "system", 2]);
    // The answer is streamed.
    await page.getByRole("button", { name: "Stop" }).waitFor();
    await page.locator(".message.assistant .said", { hasText: "Herring turn" }).waitFor();
    assert.ok(!(await page.locator(".message.assistant .said").innerText()).includes("thousands."), "it came at once");
    await shoot(page, "chat-writing");
    await page.locator(".numbers", { hasText: /^\d+ tokens · [\d.]+ tokens\/s · first after .* · 24 tokens read$/ }).waitFor();
    // Text is not interpreted as HTML.
    assert.match(await page.locator(".message.assistant .said").innerText(), /<b>matches their heading<\/b>/);
    assert.equal(await page.locator(".message b").count(), 0);
    await page.getByLabel("Message", { exact: true }).fill("And <img src=x onerror=alert(1)> birds?");
    await page.keyboard.press("Enter");
    await page.locator(".message.assistant").nth(1).locator(".said", { hasText: "Herring turn" }).waitFor();
    await page.getByRole("button", { name: "Stop" }).click();
    await page.locator(".numbers", { hasText: /^about \d+ tokens .*stopped$/ }).waitFor();
    assert.equal(await page.locator("img").count(), 0);
    await record(page, "chat-busy");
    // A conversation is kept while another view is open, and its snippet contains all of it.
    await page.keyboard.press("Escape");
    await page.evaluate(() => (location.hash = "#/mesh"));
    await page.locator(".worker").first().waitFor();
    await page.goBack();
    await page.locator(".message").nth(3).waitFor();
    assert.match(await page.locator(".snippets code").innerText(), /And <img src=x/);
    // A schema is sent as such, and an invalid one is refused by the page.
    await page.getByRole("button", { name: "New conversation" }).click();
    await page.getByText("Constrain the answer by a JSON schema").click();
    await page.getByLabel("JSON schema", { exact: true }).fill('{"type": "object", ');
    await page.getByLabel("Message", { exact: true }).fill("Which fish?");
    await has(page, "The schema is not JSON");
    assert.ok(await page.getByRole("button", { name: "Send" }).isDisabled());
    await page.getByLabel("JSON schema", { exact: true }).fill('{"type": "object", "properties": {"name": {"type": "string"}}}');
    await page.getByRole("button", { name: "Send" }).click();
    await page.locator(".said", { hasText: '{"name": "herring"}' }).waitFor();
    // Bounds.
    await page.getByLabel("Max tokens").fill("5000");
    await page.getByLabel("Message", { exact: true }).fill("More?");
    await has(page, "Max tokens must be within 1 and 4,096.");
    // The page reports a model that does not generate text; the mesh refuses an unknown one.
    await page.getByLabel("Model", { exact: true }).fill("BAAI/bge-m3");
    await has(page, "It does not generate text.");
    await page.close();
  },

  async files() {
    const PNG = Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64");
    const png = (name, buffer = PNG) => ({ name, mimeType: "image/png", buffer });
    const page = await open("busy", "#/playground?verb=encode&model=google%2Fsiglip2-base-patch16-224");
    await page.getByLabel(/^Images/).setInputFiles([png("cat.png"), png("a dog's.png")]);
    await counted(page, ".files li", 2);
    const asked = page.waitForRequest((request) => request.url().includes("/v1/encode/"));
    await page.getByRole("button", { name: "Run" }).click();
    const sent = (await asked).postDataJSON();
    assert.equal(sent.items[3].images[0].data, PNG.toString("base64"));
    await page.locator(".heat th", { hasText: "a dog's.png" }).waitFor();
    await record(page, "playground-images");
    // Commands contain the names of files, never their contents.
    const hard = "It's 5 $HOME `ls` \\ \"quoted\"";
    await page.getByLabel(/^Texts/).fill(hard);
    const cwd = mkdtempSync(join(tmpdir(), "shoal-files-"));
    for (const name of ["cat.png", "a dog's.png"]) writeFileSync(join(cwd, name), PNG);
    for (const kind of ["curl", "openai", "shoal", "grpcurl"]) {
      await page.getByRole("button", { name: kind, exact: true }).click();
      const text = await page.locator(".snippets code").innerText();
      assert.match(text, /cat\.png/);
      assert.ok(!text.includes(PNG.toString("base64").slice(0, 40)));
      if (["openai", "shoal"].includes(kind)) parses(text);
      else {
        const [first, , dog] = bodyOf(text, cwd).items;
        assert.equal(first.text, hard);
        assert.equal((dog.image || dog.images[0]).data, PNG.toString("base64"));
      }
    }
    // Files that are too large are refused before they are read.
    await page.getByLabel(/^Images/).setInputFiles([png("large.png", Buffer.alloc((8 << 20) + 1))]);
    await has(page, "large.png has 8 MiB; at most 8 MiB are allowed.");
    await page.getByLabel(/^Images/).setInputFiles(Array.from({ length: 7 }, (_, at) => png(`${at}.png`)));
    await has(page, "At most 8 files are allowed.");
    await page.getByRole("button", { name: "Remove cat.png" }).click();
    await counted(page, ".files li", 1);
    // A model that reads pages returns their text.
    await page.getByRole("button", { name: "Extract", exact: true }).click();
    await page.getByLabel("Model", { exact: true }).fill("zai-org/GLM-OCR");
    await page.getByRole("button", { name: "Text", exact: true }).waitFor();
    await page.getByRole("button", { name: "Remove a dog's.png" }).click();
    await has(page, "Choose a file.");
    await page.getByLabel(/^Images and PDFs/).setInputFiles([{ name: "invoice.pdf", mimeType: "application/pdf", buffer: Buffer.from("%PDF-1.4\n%%EOF") }]);
    const read = page.waitForRequest((request) => request.url().includes("/v1/extract/"));
    await page.getByRole("button", { name: "Run" }).click();
    const document = (await read).postDataJSON();
    assert.deepEqual([document.items.length, document.items[0].document.format, document.params.options.task], [1, "pdf", "text"]);
    await page.locator(".said", { hasText: "INVOICE 4711" }).waitFor();
    await record(page, "playground-document");
    // A schema.
    await page.getByLabel("Model", { exact: true }).fill("fastino/gliner2-base-v1");
    await page.getByRole("button", { name: "Structure" }).click();
    await page.getByRole("button", { name: "Run" }).click();
    await page.locator(".data", { hasText: "Warsaw" }).waitFor();
    await record(page, "playground-structure");
    await page.getByLabel(/^Schema/).fill("{");
    await has(page, "The schema is not JSON");
    // A model that only generates text has no task here: it is for the chat.
    await page.getByLabel("Model", { exact: true }).fill("Qwen/Qwen3-0.6B");
    await has(page, "This model does not extract.");
    await has(page, "Run it to see the answer"); // not that of the model before
    assert.equal(await page.locator("#task").count(), 0);
    assert.ok(await page.getByRole("button", { name: "Run" }).isDisabled());
    await record(page, "playground-generative");
    await page.getByRole("link", { name: "open it in the chat" }).click();
    await page.getByRole("heading", { name: "Chat" }).waitFor();
    assert.equal(await page.getByLabel("Model", { exact: true }).inputValue(), "Qwen/Qwen3-0.6B");
    await page.close();
  },

  async history() {
    const page = await open("busy", "#/playground?verb=encode&model=BAAI%2Fbge-m3", { allows: ["502"] });
    for (const name of ["BAAI/bge-m3", "BAAI/bge-m3", "jinaai/jina-embeddings-v2-base-code"]) {
      await page.getByLabel("Model", { exact: true }).fill(name);
      const answered = page.waitForResponse((response) => response.url().includes("/v1/encode/"));
      await page.getByRole("button", { name: "Run" }).click();
      await answered;
    }
    await page.getByRole("link", { name: "History" }).click();
    await page.locator(".requests tr", { hasText: "BAAI/bge-m3" }).first().waitFor();
    await counted(page, ".charts .chart", 4);
    assert.match(await page.getByRole("img", { name: /^Latency over the last hour: p50 now/ }).getAttribute("aria-label"), /at most [\d.]+ m?s/);
    assert.match(await page.getByRole("img", { name: /^Jobs waiting/ }).getAttribute("aria-label"), /queue now \d/);
    assert.ok((await page.locator(".requests tr", { hasText: "BAAI/bge-m3" }).first().locator(".stack i").count()) >= 6);
    await page.locator(".requests tr", { hasText: "MODEL_LOAD_FAILED" }).first().waitFor();
    await page.locator(".plot svg").first().hover({ position: { x: 5, y: 30 } });
    await record(page, "history-busy");
    await page.getByLabel("Errors only").check();
    await page.locator(".requests tr", { hasText: "BAAI/bge-m3" }).first().waitFor({ state: "detached" });
    // It contains no user's text.
    const told = await page.evaluate(async () => (await fetch("/console/history", { headers: { "x-shoal-console": "1" } })).text());
    assert.ok(told.includes("BAAI/bge-m3") && !told.includes("herring"));
    await page.getByRole("button", { name: "jinaai/" }).first().click();
    await page.getByRole("dialog", { name: "jinaai/jina-embeddings-v2-base-code" }).waitFor();
    await page.goBack();
    await page.getByRole("dialog").waitFor({ state: "detached" });
    assert.ok(await page.getByLabel("Errors only").isChecked());
    await page.close();
    // A whole hour, with a period of unknown queue length and an incident.
    const hour = await open("busy", "#/mesh");
    await hour.route("**/console/history", (route) => route.fulfill({ json: lastHour() }));
    await hour.getByRole("link", { name: "History" }).click();
    await counted(hour, ".requests tbody tr", 50);
    await hour.getByRole("button", { name: "Show all 200" }).click();
    await counted(hour, ".requests tbody tr", 200);
    await hour.getByRole("button", { name: "Show fewer" }).click();
    await hour.locator(".plot svg").first().hover({ position: { x: 340, y: 60 } });
    await record(hour, "history-hour");
    await hour.close();
    const empty = await open("empty", "#/history");
    await has(empty, "This edge has received no requests since its start.");
    await record(empty, "history-empty");
    await empty.close();
  },

  async batches() {
    // The real API behind tokens of two tenants.
    const page = await open("tenants", "#/batches", { allows: ["401", "403"] });
    await page.locator(".problem", { hasText: "This mesh requires a token" }).waitFor();
    await record(page, "batches-guarded");
    const enter = async (value) => {
      await page.getByRole("button", { name: "Token", exact: true }).click();
      await page.getByLabel("Token", { exact: true }).last().fill(value);
      await page.getByRole("button", { name: "Save" }).click();
    };
    await enter("token-of-the-red-tenant");
    await counted(page, ".batches tbody tr", 2);
    const text = await page.locator("main").innerText();
    for (const wanted of ["BAAI/bge-m3", "1,243 done", "7 failed", "1,250 in total", "Completed", "no model", "none counted"]) assert.ok(text.includes(wanted), wanted);
    assert.ok(!text.includes("blue"));
    await page.getByText("1 error", { exact: true }).click();
    await has(page, "Line 3: The line is not JSON.");
    await page.getByText("7 failed requests").click();
    await has(page, "The errors of requests are in the file");
    await record(page, "batches-tenant");
    // Another tenant's token replaces the list at once.
    await enter("token-of-the-blue-tenant");
    await page.locator(".batches tbody tr", { hasText: "blue/model" }).waitFor();
    assert.equal(await page.locator(".batches tbody tr").count(), 1);
    assert.ok(!(await page.locator("main").innerText()).includes("BAAI/bge-m3"));
    await page.close();
    // Every state, and pages.
    const many = await open("busy", "#/mesh");
    await many.route("**/v1/batches?limit=20", (route) => route.fulfill({ json: manyBatches(20, true) }));
    await many.route("**/v1/batches?limit=100", (route) => route.fulfill({ json: manyBatches(100, true) }));
    await many.locator(".worker").first().waitFor();
    await many.keyboard.press("g");
    await many.keyboard.press("b");
    await counted(many, ".batches tbody tr", 20);
    for (const word of ["In progress", "Validating", "Finalizing", "Completed", "Failed", "Expired", "Cancelling", "Cancelled"]) await many.locator(".batches .state", { hasText: new RegExp(`^${word}$`) }).first().waitFor();
    await many.getByText("25 errors").first().click();
    await has(many, "5 more.");
    await record(many, "batches-many");
    await many.getByRole("button", { name: "Show more" }).click();
    await counted(many, ".batches tbody tr", 100);
    await has(many, "These are the newest 100.");
    assert.equal(await many.locator(".batches b").count(), 0);
    await many.getByRole("button", { name: "BAAI/bge-m3" }).first().click();
    await many.getByRole("dialog", { name: "BAAI/bge-m3" }).waitFor();
    await many.goBack();
    await many.getByRole("dialog").waitFor({ state: "detached" });
    await many.close();
    // No batches, and an edge without storage.
    const none = await open("busy", "#/batches", { allows: ["404"] });
    await has(none, "This edge serves no batches");
    await record(none, "batches-unserved");
    await none.route("**/v1/batches?*", (route) => route.fulfill({ json: { object: "list", data: [], first_id: null, last_id: null, has_more: false } }));
    await none.reload();
    await has(none, "No batches");
    await record(none, "batches-none");
    await none.close();
  },

  async jobs() {
    const many = await open("busy", "#/mesh");
    await many.route("**/v1/jobs?limit=20", (route) => route.fulfill({ json: manyJobs(20, true) }));
    await many.route("**/v1/jobs?limit=100", (route) => route.fulfill({ json: manyJobs(100, true) }));
    await many.locator(".worker").first().waitFor();
    await many.keyboard.press("g");
    await many.keyboard.press("j");
    await counted(many, ".batches tbody tr", 20);
    for (const word of ["Waiting", "Running", "Paused", "Completed", "Failed", "Expired", "Cancelled"]) await many.locator(".batches .state", { hasText: new RegExp(`^${word}$`) }).first().waitFor();
    const text = await many.locator("main").innerText();
    for (const wanted of ["10,000,000 done of 20,000,000", "12 failed", "cost 3.50", "The input is gone <b>.", "to s3://bucket/out/1"]) assert.ok(text.includes(wanted), wanted);
    assert.equal(await many.locator(".batches b").count(), 0);
    await record(many, "jobs-many");
    await many.getByRole("button", { name: "Show more" }).click();
    await counted(many, ".batches tbody tr", 100);
    await has(many, "These are the newest 100.");
    await many.close();
    // An edge without roots, and no jobs.
    const none = await open("busy", "#/jobs", { allows: ["404"] });
    await has(none, "This edge runs no jobs");
    await record(none, "jobs-unserved");
    await none.route("**/v1/jobs?*", (route) => route.fulfill({ json: { object: "list", data: [], first_id: null, last_id: null, has_more: false } }));
    await none.reload();
    await has(none, "No jobs");
    await none.close();
  },

  async address() {
    // The drawer is part of the address, and the browser's back button closes it without changing the view.
    const page = await open("busy", "#/models?q=nomic");
    await page.getByRole("button", { name: "nomic-ai/" }).click();
    const drawer = page.getByRole("dialog", { name: "nomic-ai/nomic-embed-text-v1.5" });
    await drawer.waitFor();
    await page.waitForURL(/open=nomic-ai/);
    await page.goBack();
    await drawer.waitFor({ state: "detached" });
    assert.equal(await page.getByLabel("Search models").inputValue(), "nomic");
    await page.goForward();
    await drawer.waitFor();
    await page.keyboard.press("Escape");
    await drawer.waitFor({ state: "detached" });
    assert.doesNotMatch(page.url(), /open=/);
    // The back button also switches views.
    await page.getByRole("link", { name: "Playground" }).click();
    await page.getByRole("heading", { name: "Playground" }).waitFor();
    await page.goBack();
    await page.getByRole("heading", { name: "Models" }).waitFor();
    assert.equal(await page.getByLabel("Search models").inputValue(), "nomic");
    await page.close();
    // A shared address opens the drawer, and closing it keeps the view. Nothing moves when "Placement" arrives.
    const other = await context.newPage();
    await other.setViewportSize(WIDE);
    await other.addInitScript(() => {
      globalThis.shifts = [];
      new PerformanceObserver((list) => globalThis.shifts.push(...list.getEntries().flatMap((one) => one.sources.map(({ node }) => node?.outerHTML?.slice(0, 160) ?? node?.nodeName)))).observe({ type: "layout-shift", buffered: true });
    });
    await other.route("**/console/act", async (route) => [await new Promise((resolve) => setTimeout(resolve, 1500)), await route.continue()]);
    await other.goto(`${urls.busy}/#/models?open=BAAI%2Fbge-m3`);
    const sent = other.getByRole("dialog", { name: "BAAI/bge-m3" });
    await sent.getByText("Asking the router").waitFor();
    await other.locator(".status", { hasText: "live" }).waitFor();
    await other.waitForTimeout(200);
    await other.evaluate(() => (globalThis.shifts.length = 0));
    await sent.getByText("4,200 tokens wait").first().waitFor();
    await other.waitForTimeout(300);
    assert.deepEqual(await other.evaluate(() => globalThis.shifts), []);
    await sent.getByRole("link", { name: "Try it" }).click();
    await other.getByRole("heading", { name: "Playground" }).waitFor();
    await sent.waitFor({ state: "detached" });
    await other.goBack();
    await sent.waitFor();
    await other.keyboard.press("Escape");
    await sent.waitFor({ state: "detached" });
    await other.getByRole("heading", { name: "Models" }).waitFor();
    await other.close();
  },

  async failing() {
    for (const where of ["failing", "gone"]) {
      const page = await open(where, "", { allows: ["503"] });
      await page.getByRole("alert").first().waitFor();
      await has(page, "No mesh to show");
      await record(page, `mesh-${where}`);
      await page.evaluate(() => (location.hash = "#/models"));
      await has(page, "No mesh to show");
      await page.evaluate(() => (location.hash = "#/playground"));
      await page.getByLabel("Model", { exact: true }).fill("org/model");
      await page.getByRole("button", { name: "Run" }).click();
      await page.locator(".result .problem").waitFor();
      await record(page, `playground-${where}`);
      await page.close();
    }
  },

  async many() {
    const page = await open("many", "#/models");
    await page.getByText("1,000").first().waitFor();
    await record(page, "models-many");
    assert.ok((await page.locator(".window .row").count()) < 60, "only rows in sight are in the document");
    if (!SHORT) await scroll(page);
    await page.getByLabel("Search models").fill("splade 0996");
    await counted(page, ".window .row", 1);
    await page.getByLabel("Search models").fill("org/unheard-of");
    await page.getByRole("button", { name: "Load org/unheard-of" }).waitFor();
    await record(page, "models-none-found");
    await page.getByRole("button", { name: "Show all" }).click();
    await page.getByRole("button", { name: /^Warm/ }).click();
    await page.getByText("200 of 1,000").waitFor();
    await page.getByText("Explain the states").click();
    for (const word of ["Warm", "Cold"]) await page.locator(".words dt", { hasText: new RegExp(`^${word}$`) }).waitFor();
    await record(page, "models-words");
    await page.getByText("Explain the states").click();
    // This mesh has an autoscaler, so missing workers are marked.
    // Move to the last row and back by keyboard.
    await page.locator(".window button").first().focus();
    await page.keyboard.press("End");
    await page.waitForFunction(() => document.activeElement.dataset.at === "199");
    await page.keyboard.press("ArrowUp");
    await page.waitForFunction(() => document.activeElement.dataset.at === "198");
    await page.keyboard.press("Home");
    await page.waitForFunction(() => document.activeElement.dataset.at === "0");
    await page.evaluate(() => (location.hash = "#/mesh"));
    await page.locator(".worker").nth(23).waitFor();
    await record(page, "mesh-many");
    await page.close();
  },

  async guarded() {
    const page = await open("guarded", "", { allows: ["401", "403"] });
    await has(page, "This mesh requires a token");
    await record(page, "mesh-guarded");
    const enter = async (value) => {
      await page.getByRole("button", { name: "Token", exact: true }).click();
      await page.getByLabel("Token", { exact: true }).last().fill(value);
      await page.getByRole("button", { name: "Save" }).click();
    };
    await enter("client-token");
    await has(page, "Permission denied");
    await page.evaluate(() => (location.hash = "#/playground"));
    await page.getByRole("button", { name: "Run" }).click();
    await has(page, "Cosine similarity");
    assert.match(await page.locator(".snippets code").innerText(), /\$SHOAL_TOKEN/);
    assert.doesNotMatch(await page.locator(".snippets code").innerText(), /client-token/);
    await record(page, "playground-client");
    await enter("admin-token");
    await page.evaluate(() => (location.hash = "#/mesh"));
    await page.locator(".worker").nth(3).waitFor();
    assert.doesNotMatch(page.url(), /token/);
    await page.close();
  },

  async shared() {
    // Three pages share one watch; __main__.py counts them.
    const pages = await Promise.all([open("busy"), open("busy"), open("busy")]);
    await Promise.all(pages.map((page) => page.locator(".worker").nth(3).waitFor()));
    await pages[0].close();
    await pages[1].waitForTimeout(500);
    await Promise.all(pages.slice(1).map((page) => page.locator(".status", { hasText: "live" }).waitFor()));
    await Promise.all(pages.slice(1).map((page) => page.close()));
  },

  async docs() {
    // The API reference contacts only this edge, respects the page's policy, and can send a request.
    const page = await context.newPage();
    const asked = [];
    page.on("request", (request) => asked.push(request.url()));
    page.on("pageerror", (error) => faults.push(`docs: ${error.stack || error}`));
    page.on("console", (message) => message.type() === "error" && faults.push(`docs: ${message.text()}`));
    await page.addInitScript(() => {
      document.addEventListener("securitypolicyviolation", (event) => console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`));
    });
    assert.equal((await page.goto(`${urls.busy}/docs`)).status(), 200);
    await page.getByText("/v1/embeddings").first().waitFor();
    await shoot(page, "docs-light");
    await page.goto(`${urls.busy}/docs#get-/v1/models`);
    const answer = page.waitForResponse((response) => response.url().endsWith("/v1/models"));
    await page.getByRole("button", { name: /^try$/i }).first().click();
    assert.equal((await answer).status(), 200);
    await page.emulateMedia({ colorScheme: "dark" });
    await page.locator("rapi-doc[theme=dark]").waitFor();
    await shoot(page, "docs-dark");
    for (const url of asked) assert.ok(url.startsWith(urls.busy) || url.startsWith("data:"), url);
    await page.close();
  },

  async strangers() {
    // A page of another origin can neither read data nor perform actions.
    const page = await context.newPage();
    await page.goto(urls.empty.replace("127.0.0.1", "localhost"));
    const told = await page.evaluate(async (target) => {
      const tries = {
        plain: () => fetch(`${target}/console/act`, { method: "POST", mode: "no-cors", body: '{"action":"evict","model":"a/b"}' }),
        header: () => fetch(`${target}/console/act`, { method: "POST", headers: { "x-shoal-console": "1", "content-type": "application/json" }, body: "{}" }),
        events: () => fetch(`${target}/console/events`, { headers: { "x-shoal-console": "1" } }),
      };
      const found = {};
      for (const [name, attempt] of Object.entries(tries)) {
        found[name] = await attempt().then((response) => `${response.type} ${response.status}`, (error) => error.name);
      }
      return found;
    }, urls.busy);
    for (const answer of Object.values(told)) assert.match(answer, /^(TypeError|opaque 0)$/);
    await page.close();
  },
};

for (const [name, part] of Object.entries(parts)) {
  if (ONLY && !ONLY.split(",").includes(name)) continue;
  const begin = Date.now();
  try {
    await part();
  } catch (error) {
    faults.push(`${name}: ${error.stack}`);
    for (const page of context.pages()) {
      await page.screenshot({ path: join(SHOTS, `fault-${name}.png`) }).catch(() => {});
      if (context.pages().length > 1) await page.close();
    }
  }
  console.log(`${name}: ${((Date.now() - begin) / 1000).toFixed(1)} s`);
}
await context.close();
console.log(`${shots} screenshots in ${SHOTS}`);
for (const fault of [...new Set(faults)]) console.error(`FAULT ${fault}`);
process.exit(faults.length ? 1 : 0);
