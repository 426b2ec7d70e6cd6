// What this browser keeps: conversations, settings, and until the tab is closed the conversation in
// view and the API key.
//
// Every message has its own key, and so has the rest of a conversation, its head. Several tabs can
// change one conversation: each writes only what it has changed, and takes over the rest.

import { Fault } from "./dom.js";
import { adopt, parse, parseMessage, remove, show, shownMessages } from "./tree.js";

const PREFIX = "xlstm7b/"; // then a conversation's id, and for a message "/" and its id
const FIELDS = ["parent", "role", "content", "finish", "tokens", "created", "running"];
const known = new Map(); // key: its text when this tab last read or wrote it
const deleted = new Set(); // conversations' ids
let isFull = false, complain = () => {}, tell = () => {};

export function onFull(callback) {
  complain = callback;
}

// Calls back with a conversation and what another tab has done: "deleted" it, "changed" it, or only
// "grown" an answer that it writes.
export function onNews(callback) {
  tell = callback;
}

// Calls back with the ids of conversations that other tabs have written or deleted.
export function onOtherTab(callback) {
  addEventListener("storage", ({ key }) => {
    if (key === null) [...known.keys()].filter(isHead).map(toId).forEach(callback);
    else if (key.startsWith(PREFIX)) callback(toId(key));
  });
}

const toId = (key) => key.slice(PREFIX.length).split("/")[0];
const isHead = (key) => key.startsWith(PREFIX) && !key.includes("/", PREFIX.length);

function attempt(work) {
  try {
    return work();
  } catch { /* storage is disabled, full, or holds something else */ }
}

const readKeys = () => attempt(() => Object.keys(localStorage)) ?? [];

export function readConversations() {
  return readKeys().filter(isHead).map((key) => readConversation(toId(key))).filter(Boolean);
}

// null if it is not there.
export function readConversation(id) {
  return attempt(() => {
    const key = PREFIX + id, text = localStorage.getItem(key), head = JSON.parse(text);
    const conversation = parse({ messages: {}, ...head, id });
    known.set(key, text);
    deleted.delete(id);
    takeOver(conversation);
    if (head.messages) save(conversation); // earlier versions stored all of it under one key
    else head.shown.forEach((one) => show(conversation, { id: one }));
    return conversation;
  }) ?? null;
}

// Takes over what other tabs have changed in a conversation. What this tab has changed stays.
export function takeOver(conversation) {
  const { messages } = conversation, key = PREFIX + conversation.id, start = `${key}/`;
  const keys = readKeys().filter((one) => one === key || one.startsWith(start));
  const stored = new Map(keys.map((one) => [one, localStorage.getItem(one)]));
  if (known.has(key) && !stored.has(key)) {
    removeConversation(conversation);
    return tell(conversation, "deleted");
  }
  let news = "";
  const before = JSON.parse(known.get(key) ?? null), head = JSON.parse(stored.get(key) ?? null);
  if (head && stored.get(key) !== known.get(key)) {
    if (head.title !== before?.title) conversation.title = head.title;
    conversation.updated = Math.max(conversation.updated, head.updated);
    known.set(key, stored.get(key));
    news = "changed";
  }
  const arrived = [];
  for (const [one, text] of stored) {
    const id = one.slice(start.length), mine = messages[id];
    if (one === key || text === known.get(one)) continue;
    const isOwn = mine ? toText(mine) !== known.get(one) : known.has(one);
    if (isOwn) continue; // this tab has changed or removed it
    const theirs = attempt(() => parseMessage(JSON.parse(text)));
    if (!theirs) continue;
    if (!mine) {
      arrived.push({ id, ...theirs });
      continue;
    }
    news = mine.running && theirs.running ? news || "grown" : "changed";
    Object.assign(mine, theirs);
    known.set(one, text);
  }
  for (const { id } of adopt(conversation, arrived)) {
    known.set(start + id, stored.get(start + id));
    news = "changed";
  }
  for (const one of [...known.keys()].filter((k) => k.startsWith(start) && !stored.has(k))) {
    known.delete(one);
    remove(conversation, messages[one.slice(start.length)]);
    news = "changed";
  }
  if (news) tell(conversation, news);
}

const toText = (message) => JSON.stringify(message, FIELDS);

// Writes what this tab has changed. A conversation that another tab has deleted stays deleted.
export function saveConversation(conversation) {
  takeOver(conversation);
  if (!deleted.has(conversation.id)) save(conversation);
}

function save(conversation) {
  const { title, updated, draft, state, messages } = conversation;
  const key = PREFIX + conversation.id, start = `${key}/`;
  if (conversation.shown === null && !draft && !state) return erase(conversation);
  const shown = shownMessages(conversation);
  let fits = write(key, JSON.stringify({ title, updated, draft, state, shown }));
  for (const one of Object.values(messages)) fits &&= write(start + one.id, toText(one));
  for (const one of known.keys()) {
    if (one.startsWith(start) && !messages[one.slice(start.length)]) drop(one);
  }
}

function write(key, text) {
  if (text !== known.get(key)) {
    if (!put(() => localStorage, key, text)) return false;
    known.set(key, text);
  }
  return true;
}

function drop(key) {
  attempt(() => localStorage.removeItem(key));
  known.delete(key);
}

export function removeConversation(conversation) {
  deleted.add(conversation.id);
  erase(conversation);
}

function erase({ id }) {
  const start = `${PREFIX}${id}/`;
  drop(PREFIX + id); // first: other tabs see at once that all of it is deleted
  readKeys().filter((key) => key.startsWith(start)).forEach(drop);
}

export function readSetting(name) {
  return attempt(() => JSON.parse(localStorage.getItem(`xlstm7b-${name}`))) ?? null;
}

export function saveSetting(name, value) {
  put(() => localStorage, `xlstm7b-${name}`, JSON.stringify(value));
}

export function readForTab(name) {
  return attempt(() => sessionStorage.getItem(`xlstm7b-${name}`)) ?? "";
}

export function saveForTab(name, value) {
  put(() => sessionStorage, `xlstm7b-${name}`, value);
}

function put(storage, key, text) {
  const fits = attempt(() => (storage().setItem(key, text), true)) ?? false;
  if (!fits && !isFull) {
    complain("The browser's storage is full: new messages are lost when this page is closed. "
      + "Export conversations, then delete some.");
  }
  isFull = !fits;
  return fits;
}

// Conversations as the text of a file, and back.
export function exportConversations(conversations) {
  return JSON.stringify({ format: "xlstm7b-conversations", conversations }, null, 1);
}

export function importConversations(text) {
  const value = attempt(() => JSON.parse(text));
  if (value === undefined) throw new Fault("it is not a JSON file.");
  const given = value?.conversations ?? [value];
  if (!Array.isArray(given)) throw new Fault("it holds no conversations.");
  const conversations = given.map((one) => parse(one));
  for (const { id } of conversations) deleted.delete(id);
  return conversations;
}

