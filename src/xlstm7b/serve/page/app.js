// A chat page over /v1/chat/completions. Conversations live in this browser alone. Every request
// sends its whole conversation: the server finds the state of what it has read before, so going
// on, regenerating and forking read only what is new.

const find = (id) => document.getElementById(id);
const list = find("messages"), input = find("input"), picker = find("conversations");
const settingsForm = document.querySelector("#settings form");
const KEPT = "xlstm7b";
const at = (path) => location.origin + path; // less a password that the page's own address may hold

let stateBytes = 0;
let kept = load();
let answering = null; // an AbortController while an answer grows

function load() {
  try {
    const stored = JSON.parse(localStorage.getItem(KEPT));
    if (stored.conversations.length) return stored;
  } catch { /* nothing stored, or not ours */ }
  return { conversations: [fresh()], current: 0, settings: {} };
}

function fresh() {
  return { title: "New conversation", messages: [] };
}

function save() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(kept));
  } catch { /* full or forbidden: the page works on */ }
}

const current = () => kept.conversations[kept.current];

function element(name, text, properties = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, properties);
}

function show() {
  picker.replaceChildren(...kept.conversations.map((one, index) =>
    element("option", one.title, { value: index, selected: index === kept.current })));
  list.replaceChildren(...current().messages.map(toArticle));
  list.scrollTop = list.scrollHeight;
  const busy = answering !== null;
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
      element("button", "Fork", { type: "button", onclick: () => fork(index) }),
    );
  }
  article.append(
    element("h2", message.role === "user" ? "You" : "Model"),
    element("p", message.content),
    actions,
  );
  return article;
}

function fork(index) {
  if (answering) return;
  const { title, messages } = current();
  const copy = structuredClone(messages.slice(0, index + 1));
  const forks = kept.conversations.filter((one) => one.title.startsWith(`${title} / `)).length;
  kept.conversations.push({ title: `${title} / ${forks + 1}`, messages: copy });
  kept.current = kept.conversations.length - 1;
  save();
  show();
  input.focus();
}

function regenerate(index) {
  if (answering) return;
  current().messages.length = index;
  answer();
}

function send() {
  const text = input.value.trim();
  if (answering || !text) return;
  const conversation = current();
  if (!conversation.messages.length) conversation.title = text.slice(0, 40);
  conversation.messages.push({ role: "user", content: text });
  input.value = "";
  fit();
  answer();
}

function readSettings() {
  const settings = {};
  for (const field of settingsForm.elements) {
    kept.settings[field.name] = field.value;
    if (field.type === "number" && field.value !== "") settings[field.name] = Number(field.value);
  }
  return settings;
}

async function answer() {
  const conversation = current();
  const settings = readSettings();
  const system = kept.settings.system.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []),
    ...conversation.messages];
  const reply = { role: "assistant", content: "" };
  conversation.messages.push(reply);
  answering = new AbortController();
  find("error").hidden = true;
  save();
  show();
  const article = list.lastElementChild;
  article.classList.add("growing");
  const meter = startMeter();
  try {
    await stream({ messages, ...settings }, (event) => {
      const text = event.choices[0]?.delta.content ?? "";
      reply.content += text;
      article.querySelector("p").append(text);
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
      if (atEnd) list.scrollTop = list.scrollHeight;
      meter(event);
    });
  } catch (error) {
    if (error.name !== "AbortError") tell(error.message);
  }
  if (!reply.content) conversation.messages.pop();
  answering = null;
  save();
  show();
  input.focus();
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

async function stream(body, receive) {
  const response = await fetch(at("/v1/chat/completions"), {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal: answering.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection was lost.");
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw new Error(content.error.message);
      receive(content);
    }
  }
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
input.addEventListener("input", fit);
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
  if (current().messages.length) kept.conversations.push(fresh());
  kept.current = kept.conversations.length - 1;
  save();
  show();
  input.focus();
});
find("delete").addEventListener("click", () => {
  kept.conversations.splice(kept.current, 1);
  if (!kept.conversations.length) kept.conversations.push(fresh());
  kept.current = Math.min(kept.current, kept.conversations.length - 1);
  save();
  show();
});
picker.addEventListener("change", () => {
  kept.current = Number(picker.value);
  save();
  show();
});
settingsForm.addEventListener("change", () => {
  readSettings();
  save();
});
settingsForm.addEventListener("submit", (event) => event.preventDefault());

for (const field of settingsForm.elements) {
  if (field.name in kept.settings) field.value = kept.settings[field.name];
}
show();
fetch(at("/v1/models")).then((response) => response.json()).then(({ data }) => {
  find("model").textContent = document.title = data[0].id;
  stateBytes = data[0].state_bytes;
}).catch(() => tell("The server does not answer."));
