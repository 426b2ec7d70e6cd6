// A chat page over /v1/chat/completions. Conversations live in this browser alone, each under a key
// of its own, so that several tabs don't overwrite each other's. Every request sends its whole
// conversation: the server finds the state of what it has read before, so going on, regenerating
// and forking read only what is new.

import { ask, stream } from "./server.js";

const find = (id) => document.getElementById(id);
const list = find("messages"), input = find("input"), picker = find("conversations");
const settingsForm = document.querySelector("#settings form");
const KEPT = "xlstm7b/"; // before a conversation's id
const SETTINGS = "xlstm7b-settings", CURRENT = "xlstm7b-current", KEY = "xlstm7b-key";

let stateBytes = 0;
let settings = attempt(() => JSON.parse(localStorage.getItem(SETTINGS))) ?? {};
let conversations = load();
let current = conversations.find((one) => one.id === attempt(() => Number(sessionStorage[CURRENT])))
  ?? conversations.at(-1);
let answering = null; // an AbortController while an answer grows

function attempt(work) {
  try {
    return work();
  } catch { /* this browser stores nothing, or what is stored is not ours */ }
}

function load() {
  const keys = attempt(() => Object.keys(localStorage).filter((key) => key.startsWith(KEPT))) ?? [];
  const found = keys.map((key) => attempt(() => JSON.parse(localStorage.getItem(key))))
    .filter((one) => one?.messages).sort((a, b) => a.id - b.id);
  for (const { messages } of found) { // one may have been left before its answer's first word
    if (messages.at(-1)?.content === "") messages.pop();
  }
  return found.length ? found : [fresh(0)];
}

function fresh(last, title = "New conversation", messages = []) {
  return { id: Math.max(Date.now(), last + 1), title, messages, draft: "" };
}

function save() {
  try {
    localStorage.setItem(KEPT + current.id, JSON.stringify(current));
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
    sessionStorage.setItem(CURRENT, current.id);
  } catch {
    tell("This browser stores no more: what is said from now on is lost when the page is closed.");
  }
}

function open(conversation) {
  if (!conversations.includes(conversation)) conversations.push(conversation);
  current = conversation;
  save();
  show();
  input.focus();
}

function element(name, text, properties = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, properties);
}

function show() {
  picker.replaceChildren(...conversations.map((one) =>
    element("option", one.title, { value: one.id, selected: one === current })));
  list.replaceChildren(...current.messages.map(toArticle));
  list.scrollTop = list.scrollHeight;
  input.value = current.draft;
  fit();
}

function setAnswering(controller) {
  answering = controller;
  const busy = controller !== null;
  document.body.classList.toggle("busy", busy);
  list.ariaBusy = busy; // it is read out when it is whole
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  for (const control of [picker, find("new"), find("delete")]) control.disabled = busy;
}

function toArticle(message, index) {
  const article = element("article", "", { className: message.role });
  const actions = element("div", "", { className: "actions" });
  if (message.role === "assistant") {
    actions.append(
      element("button", "Regenerate", { type: "button", onclick: () => regenerate(index) }),
      element("button", "Fork", { type: "button", onclick: () => fork(index + 1) }),
    );
  } else if (index === current.messages.length - 1) {
    actions.append(element("button", "Try again", { type: "button", onclick: () => answer() }));
  }
  article.append(
    element("h2", message.role === "user" ? "You" : "Model"),
    element("p", message.content),
    actions,
  );
  return article;
}

function fork(length) {
  const { title, messages } = current;
  const forks = conversations.filter((one) => one.title.startsWith(`${title} / `)).length;
  const copy = structuredClone(messages.slice(0, length));
  open(fresh(conversations.at(-1).id, `${title} / ${forks + 1}`, copy));
}

// The last answer is replaced by another; one that has been gone on from is left to a fork.
function regenerate(index) {
  if (index < current.messages.length - 1) {
    fork(index);
    answer();
  } else {
    answer(current.messages.pop());
  }
}

function send() {
  const text = input.value.trim();
  if (answering || !text) return;
  if (!current.messages.length) current.title = text.slice(0, 40);
  current.messages.push({ role: "user", content: text });
  current.draft = "";
  answer();
}

function readSettings() {
  const numbers = {};
  for (const field of settingsForm.elements) {
    if (!field.name) continue;
    settings[field.name] = field.value;
    if (field.type === "number" && field.value !== "") numbers[field.name] = Number(field.value);
  }
  return numbers;
}

// `before` is the answer that stays if there is no other.
async function answer(before) {
  const { messages } = current;
  const numbers = readSettings();
  const system = settings.system.trim();
  const asked = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  const reply = { role: "assistant", content: "" };
  messages.push(reply);
  setAnswering(new AbortController());
  find("error").hidden = true;
  if (!before) save();
  show();
  const article = list.lastElementChild;
  article.classList.add("growing");
  const meter = startMeter();
  // Shown once a frame: a stream may be faster than the page is laid out, and must not freeze it.
  let frame = 0, shown = 0;
  const showMore = () => {
    frame = 0;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    article.querySelector("p").append(reply.content.slice(shown));
    shown = reply.content.length;
    if (atEnd) list.scrollTop = list.scrollHeight;
  };
  let failure = null;
  try {
    const body = { messages: asked, ...numbers };
    await stream(body, find("key").value, answering.signal, (event) => {
      reply.content += event.choices[0]?.delta.content ?? "";
      frame ||= requestAnimationFrame(showMore);
      meter(event);
    });
  } catch (error) {
    failure = error;
    explain(error);
  }
  cancelAnimationFrame(frame);
  showMore();
  article.classList.remove("growing");
  setAnswering(null);
  if (!reply.content) {
    if (!failure) tell("The answer was empty.");
    messages.pop();
    if (before) messages.push(before);
    show();
  }
  save();
  if (document.activeElement !== find("key")) input.focus();
}

function startMeter() {
  const began = performance.now();
  let first = 0, chunks = 0;
  return (event) => {
    const now = performance.now();
    first ||= now;
    chunks += event.choices.length;
    const usage = event.usage;
    const tokens = usage ? usage.completion_tokens : chunks;
    const speed = tokens > 1 ? (tokens - 1) / Math.max((now - first) / 1000, 1e-3) : 0;
    const parts = [`${tokens} tokens`, `${speed.toFixed(1)} tok/s`,
      `first after ${((first - began) / 1000).toFixed(2)} s`, `state ${toSize(stateBytes)}`];
    if (usage) {
      const cached = usage.prompt_tokens_details.cached_tokens;
      parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens from a kept state`);
    }
    find("status").textContent = parts.join(" · ");
  };
}

function toSize(bytes) {
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function explain(error) {
  if (error.name === "AbortError") return; // as they wished
  tell(error.message);
  if (error.cause !== 401) return;
  find("settings").open = true;
  find("key-label").hidden = false;
  find("key").focus();
}

function tell(message) {
  find("error").textContent = message;
  find("error").hidden = false;
}

function fit() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("input", () => {
  current.draft = input.value;
  fit();
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.abort();
});
find("stop").addEventListener("click", () => answering?.abort());
find("new").addEventListener("click", () => {
  const last = conversations.at(-1);
  open(last.messages.length ? fresh(last.id) : last);
});
find("delete").addEventListener("click", () => {
  if (current.messages.length && !confirm(`Delete “${current.title}”?`)) return;
  attempt(() => localStorage.removeItem(KEPT + current.id));
  const place = conversations.indexOf(current);
  conversations.splice(place, 1);
  open(conversations[place] ?? conversations.at(-1) ?? fresh(current.id));
});
picker.addEventListener("change", () => {
  save(); // its draft
  open(conversations.find((one) => one.id === Number(picker.value)));
});
settingsForm.addEventListener("change", () => {
  readSettings();
  attempt(() => sessionStorage.setItem(KEY, find("key").value)); // no longer than this tab
  save();
});
settingsForm.addEventListener("submit", (event) => event.preventDefault());
find("key").addEventListener("change", greet);
addEventListener("pagehide", save); // half an answer, and a draft
addEventListener("storage", () => { // another tab has said something
  if (answering) return;
  conversations = load();
  const own = conversations.findIndex((one) => one.id === current.id);
  if (own < 0) conversations.push(current);
  else current = Object.assign(conversations[own], { draft: current.draft });
  show();
});

async function greet() {
  try {
    const { data: [model] } = await (await ask("v1/models", find("key").value)).json();
    find("model").textContent = document.title = model.id;
    stateBytes = model.state_bytes;
    find("error").hidden = true;
  } catch (error) {
    explain(error);
  }
}

for (const field of settingsForm.elements) {
  if (field.name in settings) field.value = settings[field.name];
}
find("key").value = attempt(() => sessionStorage.getItem(KEY)) ?? "";
find("key-label").hidden = !find("key").value;
show();
greet();
