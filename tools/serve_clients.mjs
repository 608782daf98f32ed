// Checks the server with openai for Node, on the scripted model of its tests, which says what stands
// after the last `say:`. `serve_clients.py` does the same with clients for Python.
//
//     cargo build -p rust-mlx-inference-server --example scripted
//     npm install --prefix target/clients-node openai@7.57.0
//     node tools/serve_clients.mjs target/debug/examples/scripted
//
// The first check that fails ends the script with exit code 1.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import path from "node:path";
import readline from "node:readline";

const require = createRequire(path.resolve("target/clients-node/package.json"));
const { OpenAI } = require("openai");

const program = process.argv[2];
if (!program) throw new Error("usage: serve_clients.mjs PROGRAM");
const server = spawn(program, { stdio: ["pipe", "pipe", "inherit"] });
const lines = readline.createInterface({ input: server.stdout });
const address = (await lines[Symbol.asyncIterator]().next()).value;
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;

const user = (content) => ({ role: "user", content });
const base = { model, max_tokens: 200, temperature: 0 };
const ask = (content, more) =>
  client.chat.completions.create({ ...base, messages: [user(content)], ...more });
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "warmth", parameters } }];

/** Waits until no request holds a place. */
async function idle() {
  const until = Date.now() + 30_000;
  while ((await (await fetch(`${address}/ready`)).json()).requests > 0) {
    assert(Date.now() < until, "requests hang");
    await new Promise((done) => setTimeout(done, 20));
  }
}

const checks = {
  async chat() {
    const reply = await ask("say:Hello there.");
    assert.equal(reply.choices[0].message.content, "Hello there.");
    assert.equal(reply.usage.completion_tokens, 12);
  },
  async stream() {
    const stream = await ask("say:Hello there.", {
      stream: true,
      stream_options: { include_usage: true },
    });
    let [text, usage] = ["", null];
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, "Hello there.");
    assert.equal(usage.completion_tokens, 12);
  },
  async tools() {
    const call = { name: "warmth", arguments: { city: "Paris" } };
    const question = user(`say:<tool_call>${JSON.stringify(call)}</tool_call>`);
    const given = { ...base, tools, messages: [question] };
    const { message, finish_reason } = (await client.chat.completions.create(given)).choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), call.arguments);
    const runner = client.chat.completions.stream(given);
    let parts = 0;
    runner.on("tool_calls.function.arguments.delta", () => (parts += 1));
    const streamed = (await runner.finalChatCompletion()).choices[0].message;
    assert.deepEqual(JSON.parse(streamed.tool_calls[0].function.arguments), call.arguments);
    assert(parts > 1, "the arguments came in one piece");
    const result = {
      role: "tool",
      tool_call_id: message.tool_calls[0].id,
      content: "say:It is 12 degrees.",
    };
    const messages = [question, message, result];
    const reply = await client.chat.completions.create({ ...base, tools, messages });
    assert.equal(reply.choices[0].message.content, "It is 12 degrees.");
  },
  async structured() {
    const schema = { type: "object", properties: { a: { type: "integer" } } };
    const response_format = { type: "json_schema", json_schema: { name: "x", schema } };
    const reply = await ask("Which number?", { response_format });
    assert.deepEqual(JSON.parse(reply.choices[0].message.content), { a: 1 });
  },
  async embeddings() {
    const vectors = await client.embeddings.create({ model, input: ["a", "b"] });
    assert.equal(vectors.data.length, 2);
    assert.equal(vectors.data[0].embedding.length, 2);
  },
  async errors() {
    const other = await ask("x", { model: "other" }).catch((error) => error);
    assert(other instanceof OpenAI.NotFoundError, other);
    assert.equal(other.code, "model_not_found");
    const bad = await ask("x", { temperature: 7 }).catch((error) => error);
    assert(bad instanceof OpenAI.BadRequestError, bad);
    assert.equal(bad.param, "temperature");
  },
  async cancel() {
    const stream = await ask("!long", { stream: true, max_tokens: 50_000 });
    let n = 0;
    for await (const _ of stream) if (++n === 3) break;
    assert(stream.controller.signal.aborted);
    const slow = client.chat.completions.create(
      { ...base, max_tokens: 50_000, messages: [user("!long")] },
      { timeout: 300 },
    );
    assert((await slow.catch((error) => error)) instanceof OpenAI.APIConnectionTimeoutError);
  },
};

try {
  for (const [name, check] of Object.entries(checks)) {
    const started = Date.now();
    await check();
    await idle();
    console.log(`openai ${name.padEnd(12)} ${((Date.now() - started) / 1000).toFixed(1)} s`);
  }
  console.log("openai for Node is content");
} finally {
  server.stdin.end();
}
