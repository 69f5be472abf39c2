// Takes one screenshot of URL into OUT; see screenshots.py.

import { createRequire } from "node:module";
import { join } from "node:path";

const { TOOLS, CHROMIUM, URL: url, OUT } = process.env;
const { chromium } = createRequire(join(TOOLS, "package.json"))("playwright-core");
const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
const page = await browser.newPage({ viewport: { width: 1280, height: Number(process.env.HEIGHT || 760) }, colorScheme: "light" });
await page.goto(url);
await page.locator("main").waitFor();
await page.waitForTimeout(12_000);  // until rates of ten seconds are known
await page.screenshot({ path: OUT, animations: "disabled" });
await browser.close();
