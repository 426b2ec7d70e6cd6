// A chat page for /v1/chat/completions. Conversations are stored in this browser only, each under
// its own key, so that several tabs do not overwrite each other. Every request sends the whole
// conversation; the server finds the part that it has read before in its prefix cache.

import { callServer, stream } from "./server.js";

const find = (id) => document.getElementById(id);
const list = find("messages"), input = find("input"), picker = find("conversations");
const settingsForm = document.querySelector("#settings form");
const CONVERSATION = "xlstm7b/"; // and a conversation's id: its key in localStorage
const SETTINGS = "xlstm7b-settings", CURRENT = "xlstm7b-current", KEY = "xlstm7b-key";

let stateBytes = 0;
let settings = attempt(() => JSON.parse(localStorage.getItem(SETTINGS))) ?? {};
let conversations = load();
let current = conversations.find((one) => one.id === attempt(() => Number(sessionStorage[CURRENT])))
  ?? conversations.at(-1);
let answering = null; // an AbortController while an answer streams

function attempt(work) {
  try {
    return work();
  } catch { /* storage is disabled, or holds something else */ }
}

function load() {
  const stored = attempt(() => Object.keys(localStorage)) ?? [];
  const keys = stored.filter((key) => key.startsWith(CONVERSATION));
  const found = keys.map((key) => attempt(() => JSON.parse(localStorage.getItem(key))))
    .filter((one) => one?.messages).sort((a, b) => a.id - b.id);
  for (const { messages } of found) { // the page was closed before the answer's first word
    if (messages.at(-1)?.content === "") messages.pop();
  }
  return found.length ? found : [newConversation(0)];
}

function newConversation(lastId, title = "New conversation", messages = []) {
  return { id: Math.max(Date.now(), lastId + 1), title, messages, draft: "" };
}

function save() {
  try {
    localStorage.setItem(CONVERSATION + current.id, JSON.stringify(current));
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
    sessionStorage.setItem(CURRENT, current.id);
  } catch {
    showError("The browser's storage is full: new messages are lost when this page is closed.");
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
  const created = document.createElement(name);
  created.textContent = text;
  return Object.assign(created, properties);
}

function show() {
  picker.replaceChildren(...conversations.map((one) =>
    element("option", one.title, { value: one.id, selected: one === current })));
  list.replaceChildren(...current.messages.map(toArticle));
  list.scrollTop = list.scrollHeight;
  input.value = current.draft;
  fitInput();
}

function setAnswering(controller) {
  answering = controller;
  const busy = controller !== null;
  document.body.classList.toggle("busy", busy);
  list.ariaBusy = busy; // screen readers wait until it is complete
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
  open(newConversation(conversations.at(-1).id, `${title} / ${forks + 1}`, copy));
}

// Replaces the last answer. For an earlier answer it makes a fork, so that later messages are kept.
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

// `previous` is the answer to restore if there is no new one.
async function answer(previous) {
  const { messages } = current;
  const numbers = readSettings();
  const system = settings.system.trim();
  const sent = [...(system ? [{ role: "system", content: system }] : []), ...messages];
  const reply = { role: "assistant", content: "" };
  messages.push(reply);
  setAnswering(new AbortController());
  find("error").hidden = true;
  if (!previous) save();
  show();
  const article = list.lastElementChild;
  article.classList.add("growing");
  const meter = startMeter();
  // Drawn once per frame: drawing every chunk of a fast stream would freeze the page.
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
    const body = { messages: sent, ...numbers };
    await stream(body, find("key").value, answering.signal, (event) => {
      reply.content += event.choices[0]?.delta.content ?? "";
      frame ||= requestAnimationFrame(showMore);
      meter(event);
    });
  } catch (error) {
    failure = error;
    showFailure(error);
  }
  cancelAnimationFrame(frame);
  showMore();
  article.classList.remove("growing");
  setAnswering(null);
  if (!reply.content) {
    if (!failure) showError("The answer was empty.");
    messages.pop();
    if (previous) messages.push(previous);
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
      `first token after ${((first - began) / 1000).toFixed(2)} s`, `state ${toSize(stateBytes)}`];
    if (usage) {
      const cached = usage.prompt_tokens_details.cached_tokens;
      parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
    }
    find("status").textContent = parts.join(" · ");
  };
}

function toSize(bytes) {
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function showFailure(error) {
  if (error.name === "AbortError") return; // the user stopped it
  showError(error.message);
  if (error.cause !== 401) return;
  find("settings").open = true;
  find("key-label").hidden = false;
  find("key").focus();
}

function showError(message) {
  find("error").textContent = message;
  find("error").hidden = false;
}

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("input", () => {
  current.draft = input.value;
  fitInput();
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
  open(last.messages.length ? newConversation(last.id) : last);
});
find("delete").addEventListener("click", () => {
  if (current.messages.length && !confirm(`Delete “${current.title}”?`)) return;
  attempt(() => localStorage.removeItem(CONVERSATION + current.id));
  const index = conversations.indexOf(current);
  conversations.splice(index, 1);
  open(conversations[index] ?? conversations.at(-1) ?? newConversation(current.id));
});
picker.addEventListener("change", () => {
  save(); // the draft
  open(conversations.find((one) => one.id === Number(picker.value)));
});
settingsForm.addEventListener("change", () => {
  readSettings();
  attempt(() => sessionStorage.setItem(KEY, find("key").value)); // until this tab is closed
  save();
});
settingsForm.addEventListener("submit", (event) => event.preventDefault());
find("key").addEventListener("change", showModel);
addEventListener("pagehide", save); // an unfinished answer, and the draft
addEventListener("storage", () => { // another tab changed a conversation
  if (answering) return;
  conversations = load();
  const own = conversations.findIndex((one) => one.id === current.id);
  if (own < 0) conversations.push(current);
  else current = Object.assign(conversations[own], { draft: current.draft });
  show();
});

async function showModel() {
  try {
    const { data: [model] } = await (await callServer("v1/models", find("key").value)).json();
    find("model").textContent = document.title = model.id;
    stateBytes = model.state_bytes;
    find("error").hidden = true;
  } catch (error) {
    showFailure(error);
  }
}

for (const field of settingsForm.elements) {
  if (field.name in settings) field.value = settings[field.name];
}
find("key").value = attempt(() => sessionStorage.getItem(KEY)) ?? "";
find("key-label").hidden = !find("key").value;
show();
showModel();
