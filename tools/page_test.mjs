// Checks the page of `mlx serve` in a real browser, on the scripted model of the server's tests.
//
//     cargo build -p rust-mlx-inference-server --example scripted
//     npm install --prefix target/page playwright-core@1.65.1 @sparticuz/chromium@153.0.0
//     node tools/page_test.mjs target/debug/examples/scripted
//
// Chromium is the file that the variable CHROMIUM names, or `chromium` (Debian's package), or that of
// the package `@sparticuz/chromium`, for Linux on x86-64. The first check that fails ends the script
// with exit code 1. So does a run of more than five minutes.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import readline from "node:readline";

const require = createRequire(path.resolve("target/page/package.json"));
const { chromium } = require("playwright-core");

/** The browser's file, and the arguments that it needs. */
async function installed() {
  const args = ["--no-sandbox", "--disable-dev-shm-usage"];
  const debian = "/usr/bin/chromium";
  const file = process.env.CHROMIUM ?? (fs.existsSync(debian) ? debian : undefined);
  if (file) return { executablePath: file, args };
  // The package unpacks the browser into the directory for temporary files.
  process.env.TMPDIR = path.resolve("target/page/tmp");
  fs.mkdirSync(process.env.TMPDIR, { recursive: true });
  const { default: packed } = await import(require.resolve("@sparticuz/chromium"));
  // In one process, all profiles would share their storage.
  const several = packed.args.filter((arg) => arg !== "--single-process");
  return { executablePath: await packed.executablePath(), args: [...several, ...args] };
}

setTimeout(() => {
  console.error("error: the page's test takes more than five minutes");
  process.exit(1);
}, 300_000).unref();

const program = process.argv[2];
if (!program) throw new Error("usage: page_test.mjs PROGRAM");
const server = spawn(program, { stdio: ["pipe", "pipe", "inherit"] });
const lines = readline.createInterface({ input: server.stdout });
const address = (await lines[Symbol.asyncIterator]().next()).value;
const browser = await chromium.launch(await installed());

/** A new browser profile with the page open, which fails on any error and any foreign request. */
async function open(options = {}) {
  const context = await browser.newContext(options);
  const page = await context.newPage();
  page.setDefaultTimeout(30_000);
  const faults = [];
  page.on("pageerror", (error) => faults.push(`error: ${error}`));
  page.on("console", (message) => {
    const refused = /Failed to load resource: the server responded/.test(message.text());
    if (message.type() === "error" && !refused) faults.push(`console: ${message.text()}`);
  });
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(address) && !url.startsWith("data:")) faults.push(`request: ${url}`);
  });
  page.on("dialog", (dialog) => {
    faults.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  await page.goto(address);
  await page.waitForFunction(() => document.querySelector("#model").options.length > 0);
  return { page, faults, context };
}

async function say(page, text) {
  await page.fill("#input", text);
  await page.press("#input", "Enter");
}

/** The last reply, once it is complete. */
async function reply(page) {
  await page.waitForSelector("#send:not([hidden])");
  return page.locator(".message.assistant").last();
}

async function requests() {
  const ready = await fetch(`${address}/ready`);
  return (await ready.json()).requests;
}

const checks = {
  async "a reply streams, and its rate is told"() {
    const { page, faults } = await open();
    await say(page, "say:Guten Tag");
    const last = await reply(page);
    assert.equal(await last.locator(".text").innerText(), "Guten Tag");
    assert.match(await page.innerText("#status"), /^9 tokens, [\d.]+ per second$/);
    assert.deepEqual(faults, []);
  },

  async "Markdown becomes elements, and nothing in it runs"() {
    const { page, faults } = await open();
    const text = [
      "# Title",
      "",
      "Some **bold**, *fine* and `code` with <b>tags</b>.",
      "",
      "- one",
      "- two",
      "",
      "```js",
      "let a = '<img src=x onerror=alert(1)>';",
      "```",
      "",
      "| a | b |",
      "|---|---|",
      "| 1 | 2 |",
      "",
      "<img src=x onerror=alert(1)> [bad](javascript:alert(1)) [good](https://example.org/)",
    ].join("⏎");
    await say(page, `say:${text}`);
    const last = (await reply(page)).locator(".text");
    assert.equal(await last.locator("h1").innerText(), "Title");
    assert.equal(await last.locator("strong").innerText(), "bold");
    assert.equal(await last.locator("em").innerText(), "fine");
    assert.equal(await last.locator("p code").innerText(), "code");
    assert.equal(await last.locator("li").count(), 2);
    assert.match(await last.locator("pre code").innerText(), /onerror/);
    assert.equal(await last.locator("td").count(), 2);
    assert.equal(await last.locator("img, script, b").count(), 0);
    assert.equal(await last.locator("a").count(), 1);
    assert.equal(await last.locator("a").getAttribute("rel"), "noopener noreferrer");
    assert.deepEqual(faults, []);
  },

  async "a reply is stopped by a key and by the button"() {
    for (const stop of [(page) => page.keyboard.press("Escape"), (page) => page.click("#stop")]) {
      const { page, faults } = await open();
      await say(page, "!long");
      const text = page.locator(".message.assistant .text");
      await page.waitForFunction(
        () => document.querySelector(".message.assistant .text")?.innerText.length > 50,
      );
      assert.equal(await requests(), 1);
      await stop(page);
      await reply(page);
      assert.equal(await page.innerText("#status"), "Stopped.");
      const length = (await text.innerText()).length;
      await page.waitForTimeout(300);
      assert.equal((await text.innerText()).length, length);
      for (let i = 0; i < 100 && (await requests()) > 0; i++) await page.waitForTimeout(100);
      assert.equal(await requests(), 0);
      assert.deepEqual(faults, []);
    }
  },

  async "reasoning is folded"() {
    const { page, faults } = await open();
    await say(page, "say:<think>hm</think>well");
    const last = await reply(page);
    assert.equal((await last.locator(".text").innerText()).trim(), "well");
    assert.equal(await last.locator("details").getAttribute("open"), null);
    assert.match(await last.locator("details").textContent(), /hm/);
    assert.deepEqual(faults, []);
  },

  async "conversations are kept, changed and deleted"() {
    const { page, faults } = await open();
    await say(page, "say:first");
    await reply(page);
    await page.keyboard.press("Alt+n");
    assert.equal(await page.locator(".message").count(), 0);
    await say(page, "say:second");
    await reply(page);
    await page.reload();
    const titles = page.locator("#conversations .title");
    await page.waitForFunction(() => document.querySelectorAll("#conversations li").length === 2);
    assert.deepEqual(await titles.allInnerTexts(), ["say:second", "say:first"]);
    await titles.nth(1).click();
    assert.equal(await page.locator(".assistant .text").innerText(), "first");
    await page.keyboard.press("Alt+ArrowUp");
    assert.equal(await page.locator(".assistant .text").innerText(), "second");
    await page.getByText("Edit").click();
    assert.equal(await page.inputValue("#input"), "say:second");
    await say(page, "say:third");
    await reply(page);
    assert.deepEqual(await page.locator(".text").allInnerTexts(), ["say:third", "third"]);
    await page.getByText("Again").click();
    await reply(page);
    assert.deepEqual(await page.locator(".text").allInnerTexts(), ["say:third", "third"]);
    await page.getByLabel("Delete say:first").click();
    await page.reload();
    await page.waitForFunction(() => document.querySelectorAll("#conversations li").length === 1);
    assert.deepEqual(faults, []);
  },

  async "settings reach the server"() {
    const { page, faults } = await open();
    await page.keyboard.press("Alt+s");
    await page.fill("#system", "say:of the system");
    await page.fill("#max_tokens", "6");
    await page.keyboard.press("Escape");
    // The dialog's event of closing comes later than the key.
    await page.waitForFunction(() => localStorage.getItem("settings")?.includes("of the system"));
    await say(page, "hello");
    const last = await reply(page);
    assert.equal(await last.locator(".text").innerText(), "of the");
    assert.match(await last.locator(".error").innerText(), /as many tokens/);
    assert.deepEqual(faults, []);
  },

  async "an error is told in the server's words"() {
    const { page, faults } = await open();
    await say(page, "!refuse");
    const last = await reply(page);
    assert.match(await last.locator(".error").innerText(), /grammar has no end/);
    // The word that fails is in the conversation; another one goes on.
    await page.keyboard.press("Alt+n");
    await say(page, "say:on it goes");
    assert.equal(await (await reply(page)).locator(".text").innerText(), "on it goes");
    assert.deepEqual(faults, []);
  },

  async "light and dark"() {
    for (const scheme of ["light", "dark"]) {
      const { page, faults } = await open({ colorScheme: scheme });
      const dark = () =>
        page.evaluate(() => getComputedStyle(document.body).backgroundColor !== "rgb(255, 255, 255)");
      assert.equal(await dark(), scheme === "dark");
      await page.click("#theme");
      assert.equal(await dark(), scheme === "light");
      await page.reload();
      assert.equal(await dark(), scheme === "light");
      assert.deepEqual(faults, []);
    }
  },

  async "a phone shows the page without scrolling sideways"() {
    for (const width of [320, 360, 400]) {
      const { page, faults } = await open({ viewport: { width, height: 640 } });
      await page.evaluate(() => {
        document.querySelector("#model").options[0].text = "owner/a-model-with-a-long-name-8bit";
      });
      const cells = Array.from({ length: 8 }, (_, i) => `column-${i}`).join(" | ");
      const rule = Array.from({ length: 8 }, () => "---").join("|");
      const text = [`| ${cells} |`, `|${rule}|`, "", "```", "x".repeat(200), "```", "y".repeat(200)];
      await say(page, `say:${text.join("⏎")}`);
      await reply(page);
      const wide = () =>
        page.evaluate(() => {
          const nodes = [...document.querySelectorAll("body, header *, #compose *, #messages")];
          const over = (node) => node.getBoundingClientRect().right > innerWidth + 0.5;
          const scrolls = document.documentElement.scrollWidth > innerWidth;
          const box = document.querySelector("#messages");
          const inner = box.scrollWidth > box.clientWidth;
          return { scrolls, inner, over: nodes.filter(over).map((node) => node.id || node.tagName) };
        });
      assert.deepEqual(await wide(), { scrolls: false, inner: false, over: [] }, `${width}`);
      await page.click("#open-settings");
      assert.equal((await wide()).scrolls, false);
      await page.keyboard.press("Escape");
      await page.click("#menu");
      assert.equal((await wide()).scrolls, false);
      assert.deepEqual(faults, []);
    }
  },

  async "a narrow window has a menu"() {
    const { page, faults } = await open({ viewport: { width: 400, height: 700 } });
    assert.equal(await page.locator("#side").isVisible(), false);
    await page.click("#menu");
    assert.equal(await page.locator("#side").isVisible(), true);
    assert.deepEqual(faults, []);
  },
};

let failed = false;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok: ${name}`);
  } catch (error) {
    failed = true;
    console.error(`FAILED: ${name}\n`, error);
  }
}
await browser.close();
server.stdin.end();
process.exitCode = failed ? 1 : 0;
