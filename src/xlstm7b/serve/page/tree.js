// A conversation as a tree. A message knows its parent, and every parent knows which of its
// children is shown. An edited message or a new answer is another child of the same parent: a
// branch.
//
//   conversation: {id, title, updated, draft, state, shown, messages: {id: message}}
//   message: {id, parent, role, content, finish, tokens, created, running, shown}
//
// `state` is the memory that the conversation starts from, or null. `finish` of an answer is
// "stop", or why it is incomplete: "length", "abort" (stopped by the reader) or "error". `tokens`
// is its length. `created` is a time, later than that of all messages before. `running` is when the
// tab that writes an answer last said so, or 0.

import { Fault } from "./dom.js";

const ID = /^[0-9a-z]+-[0-9a-z]+$/;
export const FORK = /( \(fork( \d+)?\))+$/; // the end of a title
const SILENT = 90_000; // ms: browsers let a tab in the background say something once a minute

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

export function createConversation(state = null, id = newId()) {
  return { id, title: "", updated: Date.now(), draft: "", state, shown: null, messages: {} };
}

// Whether a tab is writing an answer.
export function isRunning(message) {
  return Date.now() - message.running < SILENT;
}

// The messages that are shown, in order.
export function path(conversation) {
  const found = [];
  for (let id = conversation.shown; id !== null; id = found.at(-1).shown) {
    found.push(conversation.messages[id]);
  }
  return found;
}

// A message and all that it follows, in order.
export function lineage(conversation, message) {
  const found = [];
  for (let one = message; one; one = conversation.messages[one.parent]) found.unshift(one);
  return found;
}

// The branches at a message: all messages with its parent, itself included, oldest first.
export function branches(conversation, message) {
  return Object.values(conversation.messages).filter((one) => one.parent === message.parent)
    .sort(byAge);
}

function byAge(one, other) {
  return one.created - other.created || (one.id < other.id ? -1 : 1);
}

function holder(conversation, parent) {
  return parent === null ? conversation : conversation.messages[parent];
}

// Adds a message after `parent`, an id or null, and shows it.
export function add(conversation, parent, role, content, finish = "stop") {
  const times = Object.values(conversation.messages).map((one) => one.created + 1);
  const created = Math.max(Date.now(), ...times);
  const rest = { finish, tokens: 0, created, running: 0, shown: null };
  const message = { id: newId(), parent, role, content, ...rest };
  insert(conversation, message);
  conversation.updated = Date.now();
  show(conversation, message);
  return message;
}

// Another branch that is shown stays.
function insert(conversation, message) {
  conversation.messages[message.id] = message;
  holder(conversation, message.parent).shown ??= message.id;
  if (!conversation.title && message.role === "user") conversation.title = toTitle(message.content);
}

// Adds messages from elsewhere that are not there but whose parents are. Returns those.
export function adopt(conversation, messages) {
  return messages.toSorted(byAge).filter((one) => {
    const isNew = !conversation.messages[one.id] && holder(conversation, one.parent);
    if (isNew) insert(conversation, { ...one, shown: null });
    return isNew;
  });
}

export function toTitle(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

export function show(conversation, { id }) {
  const message = conversation.messages[id]; // another tab may have deleted it
  if (message) holder(conversation, message.parent).shown = id;
}

// The ids of those that are shown, in every branch.
export function shownMessages(conversation) {
  return Object.values(conversation.messages)
    .filter((one) => holder(conversation, one.parent).shown === one.id).map((one) => one.id);
}

// Removes a message and all that follow it, in every branch. Another branch is shown if there is
// one.
export function remove(conversation, message) {
  if (!conversation.messages[message?.id]) return; // another tab was first
  for (const one of Object.values(conversation.messages)) {
    if (one.parent === message.id) remove(conversation, one);
  }
  const all = branches(conversation, message);
  const index = all.indexOf(message);
  const parent = holder(conversation, message.parent);
  if (parent.shown === message.id) parent.shown = (all[index - 1] ?? all[index + 1])?.id ?? null;
  delete conversation.messages[message.id];
}

// The number of messages that `remove` removes.
export function countFrom(conversation, message) {
  const children = Object.values(conversation.messages).filter((one) => one.parent === message.id);
  return children.reduce((count, one) => count + countFrom(conversation, one), 1);
}

// A new conversation with the shown messages up to this one, and a title that is not among these.
export function fork(conversation, message, titles) {
  const copy = createConversation(conversation.state);
  for (const one of path(conversation)) {
    const parent = path(copy).at(-1)?.id ?? null;
    add(copy, parent, one.role, one.content, one.finish).tokens = one.tokens;
    if (one === message) break;
  }
  const original = conversation.title.replace(FORK, "");
  copy.title = `${original} (fork)`;
  for (let number = 2; titles.includes(copy.title); number++) {
    copy.title = `${original} (fork ${number})`;
  }
  return copy;
}

export function matches(conversation, words) {
  const texts = [conversation.title, ...Object.values(conversation.messages).map((m) => m.content)];
  return texts.some((text) => text.toLowerCase().includes(words.toLowerCase()));
}

// A conversation from JSON of a file or of the browser's storage: this form, or OpenAI's list of
// messages. Anything else is an Error. What has no id gets one that is made of its content: the
// same file gives the same ids.
export function parse(value) {
  const given = Array.isArray(value) ? value : value?.messages;
  if (given === null || typeof given !== "object") throw new Fault("it holds no conversation.");
  const id = ID.test(value.id) ? value.id : toId(JSON.stringify(given));
  const result = createConversation(parseState(value.state), id);
  if (typeof value.draft === "string") result.draft = value.draft;
  if (Array.isArray(given)) {
    for (const one of given) {
      if (["system", "developer"].includes(one?.role)) continue;
      addParsed(result, path(result).at(-1)?.id ?? null, one);
    }
  } else {
    parseTree(given, value.shown, result);
  }
  if (typeof value.title === "string" && value.title) result.title = value.title;
  if (typeof value.updated === "number") result.updated = value.updated;
  return result;
}

// A message from JSON, without its id.
export function parseMessage(one) {
  const { parent = null, role, finish = "stop" } = one ?? {}, content = toPlain(one?.content);
  if (!["user", "assistant"].includes(role) || content === null) {
    throw new Fault("it has a message without a text, or of neither a user nor an assistant.");
  }
  const [tokens, created, running] = [one.tokens, one.created, one.running].map((n) => +n || 0);
  return { parent, role, content, finish, tokens, created, running };
}

// OpenAI's content may be a list of parts. One that is no text becomes its type: [image_url].
function toPlain(content) {
  if (!Array.isArray(content)) return typeof content === "string" ? content : null;
  return content.map((part) => part?.text ?? `[${part?.type}]`).join("");
}

function addParsed(result, parent, one, id) {
  const message = { ...parseMessage(one), id, parent, running: 0, shown: null };
  if (!ID.test(id)) message.id = toId(JSON.stringify([parent, message.role, message.content]));
  message.created ||= Object.keys(result.messages).length;
  if (!result.messages[message.id]) insert(result, message);
  return message.id;
}

function parseTree(given, shown, result) {
  const ids = new Map([[null, null]]); // ids in the file to those here
  for (const [id, one] of Object.entries(given)) {
    if (!ids.has(one?.parent)) throw new Fault("its messages are not in order.");
    ids.set(id, addParsed(result, ids.get(one.parent), one, id));
  }
  for (const [id, one] of [[null, { shown }], ...Object.entries(given)]) {
    const child = result.messages[ids.get(one.shown ?? null)];
    if (child?.parent === ids.get(id)) show(result, child);
  }
}

function toId(text) {
  let one = 0x3c6ef372, other = 0x1f83d9ab;
  for (let index = 0; index < text.length; index++) {
    one = Math.imul(one ^ text.charCodeAt(index), 0x9e3779b1);
    other = Math.imul(other + text.charCodeAt(index), 0x85ebca77) ^ (other >>> 15);
  }
  return `0-${(one >>> 0).toString(36)}${(other >>> 0).toString(36)}`;
}

function parseState(state) {
  return typeof state?.id === "string"
    ? { id: state.id, name: String(state.name), tokens: Number(state.tokens), model: state.model }
    : null;
}
