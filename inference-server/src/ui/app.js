// The page: conversations in local storage, replies from /v1/chat/completions as they stream.

import { render } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const STORE = "conversations";
const SETTINGS = ["system", "temperature", "top_p", "max_tokens"];

/** Conversations, the newest first: {id, title, model, messages: [{role, content, reasoning}]}. */
let conversations = load(STORE, []);
let settings = load("settings", {});
let current = null;
/** The reply that streams: {controller, conversation}. */
let running = null;

function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(conversations));
    localStorage.setItem("settings", JSON.stringify(settings));
  } catch {
    status("This browser has no room left for conversations; delete some.");
  }
}

function status(text) {
  $("status").textContent = text;
}

function headers() {
  const all = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem("key");
  if (key) all.Authorization = `Bearer ${key}`;
  return all;
}

/** What went wrong, in the server's words where it has some. */
async function problem(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

async function models() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await problem(response));
    const { data } = await response.json();
    const chosen = current?.model ?? settings.model;
    $("model").replaceChildren(
      ...data.map(({ id }) => {
        const option = new Option(id, id);
        option.selected = id === chosen;
        return option;
      }),
    );
    status("");
  } catch (error) {
    status(`No models: ${error.message}`);
  }
}

// Conversations

function create() {
  current = null;
  show();
  $("input").focus();
}

function select(conversation) {
  current = conversation;
  if (conversation?.model) $("model").value = conversation.model;
  $("side").classList.remove("open");
  show();
}

function remove(conversation) {
  if (running?.conversation === conversation) stop();
  conversations = conversations.filter((c) => c !== conversation);
  save();
  if (current === conversation) create();
  else list();
}

function list() {
  $("conversations").replaceChildren(
    ...conversations.map((conversation) => {
      const line = document.createElement("li");
      line.classList.toggle("current", conversation === current);
      const title = document.createElement("button");
      title.className = "title";
      title.textContent = conversation.title;
      title.addEventListener("click", () => select(conversation));
      const gone = document.createElement("button");
      gone.textContent = "×";
      gone.setAttribute("aria-label", `Delete ${conversation.title}`);
      gone.addEventListener("click", () => remove(conversation));
      line.append(title, gone);
      return line;
    }),
  );
}

function button(label, run) {
  const node = document.createElement("button");
  node.type = "button";
  node.textContent = label;
  node.addEventListener("click", run);
  return node;
}

/** Writes text to the clipboard, where the browser lets pages do that. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    status("Copied.");
  } catch {
    status("This browser does not let pages copy.");
  }
}

function view(message, index) {
  const node = document.createElement("article");
  node.className = `message ${message.role}`;
  fill(node, message);
  const actions = document.createElement("div");
  actions.className = "actions";
  actions.append(button("Copy", () => copy(message.content)));
  if (message.role === "user") actions.append(button("Edit", () => edit(index)));
  else actions.append(button("Again", () => again(index)));
  node.append(actions);
  return node;
}

/** Puts what a message says into its node. */
function fill(node, message) {
  const parts = [];
  if (message.reasoning) {
    const details = document.createElement("details");
    // What a reader opened stays open while it grows.
    details.open = node.querySelector("details")?.open ?? false;
    const summary = document.createElement("summary");
    summary.textContent = "Reasoning";
    details.append(summary, message.reasoning);
    parts.push(details);
  }
  const text = document.createElement("div");
  text.className = "text";
  if (message.role === "user") text.textContent = message.content;
  else text.append(render(message.content));
  for (const pre of text.querySelectorAll("pre")) {
    const code = pre.textContent;
    pre.append(button("Copy", () => copy(code)));
  }
  parts.push(text);
  if (message.error) {
    const error = document.createElement("p");
    error.className = "error";
    error.textContent = message.error;
    parts.push(error);
  }
  const actions = node.querySelector(".actions");
  node.replaceChildren(...parts);
  if (actions) node.append(actions);
}

function show() {
  const messages = current?.messages ?? [];
  $("messages").replaceChildren(...messages.map(view));
  $("messages").scrollTop = $("messages").scrollHeight;
  const streams = running !== null && running.conversation === current;
  $("stop").hidden = !streams;
  $("send").hidden = streams;
  document.title = current?.title ?? "Chat";
  list();
}

// Replies

function body(conversation) {
  const messages = conversation.messages
    .filter((m) => m.content || m.role === "user")
    .map(({ role, content }) => ({ role, content }));
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  const all = {
    model: conversation.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    if (typeof settings[name] === "number") all[name] = settings[name];
  }
  return JSON.stringify(all);
}

/** The data of a stream's events, as they come. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const event = rest.slice(0, end);
      rest = rest.slice(end + 2);
      for (const line of event.split("\n")) {
        if (line.startsWith("data: ")) yield line.slice(6);
      }
    }
  }
}

async function reply(conversation) {
  if (running) return;
  const controller = new AbortController();
  running = { controller, conversation };
  const message = { role: "assistant", content: "", reasoning: "" };
  const prompt = body(conversation);
  conversation.messages.push(message);
  save();
  show();
  let began = 0;
  let tokens = 0;
  let drawn = false;
  const draw = () => {
    if (drawn) return;
    drawn = true;
    // Once a frame, however many tokens come.
    requestAnimationFrame(() => {
      drawn = false;
      if (current !== conversation) return;
      const box = $("messages");
      const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
      const node = box.children[conversation.messages.indexOf(message)];
      if (node) fill(node, message);
      if (follows) box.scrollTop = box.scrollHeight;
    });
  };
  const rate = (n, end) => {
    const seconds = (end - began) / 1000;
    if (n > 1 && seconds > 0) status(`${n} tokens, ${((n - 1) / seconds).toFixed(1)} per second`);
  };
  try {
    status("Waiting …");
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: prompt,
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await problem(response));
    let last = 0;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta ?? {};
      if (delta.content || delta.reasoning_content) {
        last = performance.now();
        began ||= last;
        tokens += 1;
        message.content += delta.content ?? "";
        message.reasoning += delta.reasoning_content ?? "";
        rate(tokens, last);
        draw();
      }
      if (chunk.choices[0]?.finish_reason === "length") {
        message.error = "The reply ends here: it has as many tokens as it may.";
      }
      if (chunk.usage) rate(chunk.usage.completion_tokens, last);
    }
  } catch (error) {
    if (controller.signal.aborted) {
      status("Stopped.");
    } else {
      message.error = error.message;
      status("");
    }
  } finally {
    running = null;
    save();
    show();
    if (current === conversation) $("input").focus();
  }
}

function stop() {
  running?.controller.abort();
}

function send(text) {
  if (running || !text.trim()) return false;
  if (!current) {
    const title = text.trim().split("\n")[0].slice(0, 60);
    current = { id: crypto.randomUUID?.() ?? String(Date.now()), title, messages: [] };
    conversations.unshift(current);
  }
  current.model = $("model").value;
  settings.model = current.model;
  current.messages.push({ role: "user", content: text });
  reply(current);
  return true;
}

/** Takes a message back into the box, with what follows it. */
function edit(index) {
  if (running) return;
  const [message] = current.messages.splice(index);
  $("input").value = message.content;
  save();
  show();
  grow();
  $("input").focus();
}

/** Asks for a reply anew. */
function again(index) {
  if (running) return;
  current.messages.splice(index);
  current.model = $("model").value;
  reply(current);
}

// The page

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

function openSettings() {
  for (const name of SETTINGS) $(name).value = settings[name] ?? "";
  $("key").value = sessionStorage.getItem("key") ?? "";
  $("settings").showModal();
}

$("settings").addEventListener("close", () => {
  settings.system = $("system").value;
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    const value = $(name).valueAsNumber;
    settings[name] = Number.isFinite(value) ? value : undefined;
  }
  const key = $("key").value;
  const changed = key !== (sessionStorage.getItem("key") ?? "");
  sessionStorage.setItem("key", key);
  save();
  if (changed) models();
});

$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  if (send($("input").value)) {
    $("input").value = "";
    grow();
  }
});
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  // While an input method composes, Enter chooses a character.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("compose").requestSubmit();
  }
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", create);
$("menu").addEventListener("click", () => $("side").classList.toggle("open"));
$("open-settings").addEventListener("click", openSettings);
$("theme").addEventListener("click", () => {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = settings.theme ?? (dark ? "dark" : "light");
  settings.theme = now === "dark" ? "light" : "dark";
  theme(settings.theme);
  save();
});
$("model").addEventListener("change", () => {
  settings.model = $("model").value;
  if (current) current.model = settings.model;
  save();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) stop();
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  const at = conversations.indexOf(current);
  const moves = { ArrowUp: at - 1, ArrowDown: at + 1 };
  if (event.code === "KeyN") create();
  else if (event.code === "KeyS") openSettings();
  else if (conversations[moves[event.key]]) select(conversations[moves[event.key]]);
  else return;
  event.preventDefault();
});

theme(settings.theme);
show();
await models();
