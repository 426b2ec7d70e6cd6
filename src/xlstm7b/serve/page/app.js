// The chat page: the conversation in view, and what its controls do. Every request sends the whole
// conversation; the server finds the part that it has read before in its prefix cache.

import "./theme.js";
import {
  answer, answerUnderWay, continueAnswer, showStatus, stop, toRequest,
} from "./answers.js";
import { ask } from "./dialog.js";
import {
  announce, counted, download, element, Fault, find, isSend, toFileName, toSentence, toSize, touch,
} from "./dom.js";
import { onStart, openMemories, saveMemory } from "./memories.js";
import { edit, grow, onAction, scrollToEnd, showMessages } from "./messages.js";
import { callServer, getJson, useKey } from "./server.js";
import { closeDrawer, nameOf, onSidebar, showConversations, toLine } from "./sidebar.js";
import {
  exportConversations, importConversations, onFull, onNews, onOtherTab, readConversation,
  readConversations, readForTab, readSetting, removeConversation, saveConversation, saveForTab,
  saveSetting, takeOver,
} from "./store.js";
import {
  add, adopt, countFrom, createConversation, fork, isRunning, path, remove, toTitle,
} from "./tree.js";

const input = find("input");
const HINT = "Enter sends, Shift+Enter starts a new line, Esc stops.";

const statuses = new WeakMap(); // a conversation: the line about its last answer

let models = [];
let model = null; // the one that answers; null until the server has said
let conversations = load();
let current = conversations.find((one) => one.id === readForTab("current"))
  ?? newest() ?? createConversation();

function load() {
  const found = readConversations();
  for (const one of found) { // the page was closed before the answer's first word
    const last = path(one).at(-1);
    if (last?.role === "assistant" && !last.content && !isRunning(last)) remove(one, last);
  }
  return found;
}

function newest() {
  return conversations.toSorted((a, b) => b.updated - a.updated)[0];
}

function save() {
  saveConversation(current);
  saveForTab("current", current.id);
}

function open(conversation) {
  save(); // the draft
  current = conversation;
  if (!conversations.includes(current)) conversations.push(current);
  const isKept = (one) => one === current || one.shown || one.draft || one.state;
  conversations = conversations.filter(isKept);
  save();
  hideError();
  show();
  scrollToEnd();
  input.value = current.draft;
  fitInput();
  if (!touch.matches) input.focus();
}

function showSidebar() {
  showConversations(conversations, current);
}

// Shows everything that depends on the current conversation.
function show() {
  const own = answerUnderWay(current);
  showSidebar();
  showMessages(current, own?.message);
  const isEmpty = current.shown === null;
  const isBusy = own !== null;
  find("title").replaceChildren(...toLine(nameOf(current)));
  document.title = current.title || model?.id || "xlstm7b";
  find("welcome").hidden = !isEmpty;
  find("welcome-documents").hidden = !model?.saves_states || current.state !== null;
  find("origin").hidden = !current.state;
  if (current.state) {
    const tokens = counted(Number(current.state.tokens), "token");
    const origin = `Starts from the memory “${current.state.name}” (${tokens})`;
    find("origin").textContent = origin;
  }
  document.body.classList.toggle("busy", isBusy);
  find("messages").ariaBusy = isBusy;
  find("send").hidden = isBusy;
  find("stop").hidden = !isBusy;
  find("save-memory").hidden = !model?.saves_states || !lastAnswer();
  find("save-memory").disabled = isBusy;
  find("open-memories").hidden = !model?.saves_states;
  showStatus(own?.status ?? statuses.get(current) ?? (touch.matches ? "" : HINT));
}

function lastAnswer() {
  return path(current).findLast((one) => one.role === "assistant");
}

// Runs `work`, which answers in a conversation, and shows what becomes of it.
async function generate(conversation, work) {
  if (!model) await showModel();
  if (!model || answerUnderWay(conversation)) return;
  hideError();
  statuses.delete(conversation);
  const error = await work(model, (isStart) => {
    if (isStart) {
      saveConversation(conversation);
      show();
      if (conversation === current) scrollToEnd();
    } else if (conversation === current) {
      statuses.set(conversation, answerUnderWay(conversation).status);
      showStatus(statuses.get(conversation));
    }
  });
  saveConversation(conversation);
  if (conversation === current) show();
  else showSidebar();
  if (error) showFailure(error);
  else if (conversation === current && !touch.matches && isNothingFocused()) input.focus();
}

function isNothingFocused() {
  return [document.body, find("stop"), null].includes(document.activeElement);
}

function reply(conversation, question) {
  return generate(conversation, (...rest) => answer(conversation, question, ...rest));
}

function send() {
  const text = input.value.trim();
  if (!text || answerUnderWay(current)) return;
  // A message without an answer, or without a word of it, is replaced by the new one, as a branch:
  // many chat templates refuse two messages of the user in a row.
  const last = path(current).findLast((one) => one.content);
  const parent = last?.role === "user" ? last.parent : last?.id ?? null;
  const question = add(current, parent, "user", text);
  input.value = current.draft = "";
  fitInput();
  reply(current, question);
}

onAction({
  Show: show,
  Branch() {
    save();
    show();
  },
  Edit(message) {
    const isAnswer = message.role === "assistant";
    edit(message, isAnswer ? "Save" : "Send", (text) => {
      const changed = add(current, message.parent, message.role, text);
      if (!isAnswer) return reply(current, changed);
      save();
      show();
    });
  },
  Regenerate: (message) => reply(current, current.messages[message.parent]),
  "Try again": (message) => reply(current, message),
  Continue: (message) => generate(current, (...rest) => continueAnswer(current, message, ...rest)),
  Fork: (message) => open(fork(current, message, conversations.map((one) => one.title))),
  async Delete(message) {
    const later = countFrom(current, message) - 1;
    const what = later > 1 ? "later messages go" : "later message goes";
    const text = later ? `${later} ${what} with it.` : "";
    const title = "Delete this message?";
    if (!await ask({ title, text, action: "Delete", isDanger: true })) return;
    remove(current, message);
    save();
    show();
    input.focus();
  },
});

onSidebar({
  open,
  async Rename(conversation) {
    const value = nameOf(conversation);
    const title = await ask({ title: "Rename the conversation", action: "Rename", value });
    if (!title) return;
    conversation.title = title;
    saveConversation(conversation);
    show();
  },
  Export(conversation) {
    exportFile(toFileName(nameOf(conversation), ".json"), [conversation]);
  },
  async Delete(conversation) {
    const title = `Delete “${nameOf(conversation)}”?`, text = "This cannot be undone.";
    if (!await ask({ title, text, action: "Delete", isDanger: true })) return;
    stop(conversation);
    removeConversation(conversation);
    conversations = conversations.filter((one) => one !== conversation);
    if (conversation === current) {
      current = newest() ?? createConversation();
      open(current);
    } else {
      show();
    }
  },
});

function exportFile(name, chosen) {
  download(name, new Blob([exportConversations(chosen)], { type: "application/json" }));
}

find("export-all").addEventListener("click", () => {
  exportFile("xlstm7b-conversations.json", conversations.filter((one) => one.shown));
});
find("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (!file) return;
  try {
    let added = 0;
    const imported = importConversations(await file.text().catch(() => "")).map((one) => {
      const mine = conversations.find(({ id }) => id === one.id);
      if (mine) added += adopt(mine, Object.values(one.messages)).length;
      else added += Object.keys(one.messages).length;
      if (!mine) conversations.push(one);
      saveConversation(mine ?? one);
      return mine ?? one;
    });
    if (imported.length) open(imported[0]);
    showStatus(`Imported: ${counted(added, "new message")}`);
    announce(find("status").textContent);
  } catch (error) {
    showError(`“${file.name}” was not imported: ${toSentence(error)}`);
  }
  closeDrawer();
  event.target.value = "";
});

onStart((state) => open(createConversation(state)));
for (const id of ["open-memories", "welcome-documents"]) {
  find(id).addEventListener("click", () => {
    closeDrawer();
    openMemories(model.id);
  });
}
find("save-memory").addEventListener("click", async () => {
  const name = await ask({
    title: "Save memory",
    text: `The server keeps what the model remembers of this conversation, in a file of ${
      toSize(model.state_bytes)}. New conversations can start from it.`,
    action: "Save", value: toTitle(nameOf(current)),
  });
  if (!name) return;
  try {
    const request = toRequest(current, lastAnswer());
    const saved = await saveMemory(request, current.state?.model ?? model.id, name);
    showStatus(`Memory saved: ${counted(saved.tokens, "token")}, ${toSize(saved.bytes)}`);
    announce("Memory saved.");
  } catch (error) {
    showFailure(error);
  }
});

let isAboutConnection = false; // the error in view

function showError(message, status = null) {
  find("error-text").textContent = message;
  find("error").hidden = false;
  isAboutConnection = status === 0;
}

function hideError() {
  find("error").hidden = true;
  isAboutConnection = false;
}

async function showFailure(error) {
  showError(toSentence(error), error.status);
  if (error.status === 0) waitForServer();
  if (error.status !== 401) return;
  const key = await ask({
    title: "API key", text: "This server needs an API key. It is kept until this tab is closed.",
    action: "Use", value: "", secret: true,
  });
  if (!key) return;
  useKey(key);
  saveForTab("key", key);
  hideError();
  await showModel();
}

let isWaiting = false;

// Asks until the server answers again.
async function waitForServer() {
  if (isWaiting) return;
  isWaiting = true;
  for (let isBack = false; !isBack;) {
    await new Promise((resolve) => { setTimeout(resolve, 2000); });
    isBack = await callServer("health").then(() => true, () => false);
  }
  isWaiting = false;
  await showModel();
  announce("The server answers again.");
}

async function showModel() {
  try {
    models = (await getJson("v1/models")).data ?? [];
    if (!models.length) throw new Fault("The server has no model.");
    const chosen = readSetting("model");
    model = models.find((one) => one.id === chosen) ?? models[0];
    const picker = find("model");
    picker.replaceChildren(...models.map((one) =>
      element("option", one.id, { value: one.id, selected: one === model })));
    picker.disabled = models.length === 1;
    showModelNote();
    if (isAboutConnection) hideError(); // others stay
    show();
  } catch (error) {
    showFailure(error);
  }
}

function showModelNote() {
  find("no-template").hidden = find("welcome-template").hidden = model.has_chat_template;
}

find("model").addEventListener("change", (event) => {
  model = models.find((one) => one.id === event.target.value);
  saveSetting("model", model.id);
  showModelNote();
});
find("error-close").addEventListener("click", hideError);
find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("input", () => {
  current.draft = input.value;
  fitInput();
});
input.addEventListener("keydown", (event) => {
  if (isSend(event)) {
    event.preventDefault();
    send();
  }
});

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

document.addEventListener("keydown", (event) => {
  const isOpen = document.querySelector("dialog[open], :popover-open");
  if (event.key === "Escape" && !isOpen) stop(current);
});
find("stop").addEventListener("click", () => stop(current));
for (const id of ["new", "new-short"]) {
  find(id).addEventListener("click", () => {
    closeDrawer();
    open(createConversation());
  });
}
addEventListener("pagehide", () => { // the draft, and unfinished answers
  save();
  for (const one of conversations.filter(answerUnderWay)) {
    answerUnderWay(one).message.running = 0;
    saveConversation(one);
  }
});
onFull(showError);
onOtherTab((id) => {
  const mine = conversations.find((one) => one.id === id);
  if (mine) return takeOver(mine);
  const found = readConversation(id);
  if (found) conversations.push(found);
  showSidebar();
});
onNews((conversation, news) => {
  const own = answerUnderWay(conversation)?.message, isCurrent = conversation === current;
  if (own && !conversation.messages[own.id]) stop(conversation);
  if (news === "deleted") {
    stop(conversation);
    conversations = conversations.filter((one) => one !== conversation);
    if (!isCurrent) return showSidebar();
    current = createConversation();
    current.draft = input.value; // what was typed here stays
    open(current);
    showError("This conversation was deleted in another tab.");
  } else if (news === "grown") {
    if (isCurrent) path(current).filter((one) => isRunning(one) && one !== own).forEach(grow);
  } else if (isCurrent) {
    show();
  } else {
    showSidebar();
  }
});

useKey(readForTab("key"));
open(current);
showModel();
