// A conversation as a tree. A message knows its parent, and every parent knows which of its
// children is shown. An edited message or a new answer is another child of the same parent: a
// branch.
//
//   conversation: {id, title, updated, draft, state, shown, messages: {id: message}}
//   message: {id, parent, role, content, finish, tokens, shown}
//
// `state` is the memory that the conversation starts from, or null. `finish` of an answer is
// "stop", or why it is incomplete: "length", "abort" (stopped by the reader) or "error". `tokens`
// is its length.

export function createConversation(state = null) {
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", updated: Date.now(), draft: "", state, shown: null, messages: {} };
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
  return Object.values(conversation.messages).filter((one) => one.parent === message.parent);
}

function holder(conversation, parent) {
  return parent === null ? conversation : conversation.messages[parent];
}

// Adds a message after `parent`, an id or null, and shows it.
export function add(conversation, parent, role, content, finish = "stop") {
  const numbers = Object.keys(conversation.messages).map((id) => Number(id.slice(1)));
  const id = `m${Math.max(0, ...numbers) + 1}`;
  const message = { id, parent, role, content, finish, tokens: 0, shown: null };
  conversation.messages[id] = message;
  conversation.updated = Date.now();
  if (!conversation.title && role === "user") conversation.title = toTitle(content);
  show(conversation, message);
  return message;
}

export function toTitle(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

export function show(conversation, message) {
  holder(conversation, message.parent).shown = message.id;
}

// Removes a message and all that follow it, in every branch. Another branch is shown if there is
// one.
export function remove(conversation, message) {
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

// A new conversation with the shown messages up to this one.
export function fork(conversation, message) {
  const copy = createConversation(conversation.state);
  for (const one of path(conversation)) {
    addParsed(copy, path(copy).at(-1)?.id ?? null, one);
    if (one === message) break;
  }
  copy.title = `${conversation.title} (fork)`;
  return copy;
}

export function matches(conversation, words) {
  const texts = [conversation.title, ...Object.values(conversation.messages).map((m) => m.content)];
  return texts.some((text) => text.toLowerCase().includes(words.toLowerCase()));
}

// A conversation from JSON of a file or of the browser's storage: this form, or OpenAI's list of
// messages. Anything else is an Error. The id is new unless `keepId`.
export function parse(value, keepId = false) {
  const result = createConversation(parseState(value?.state));
  if (keepId && typeof value?.id === "string") result.id = value.id;
  if (typeof value?.draft === "string") result.draft = value.draft;
  const given = Array.isArray(value) ? value : value?.messages;
  if (Array.isArray(given)) {
    for (const one of given) {
      if (one?.role === "system") continue;
      addParsed(result, path(result).at(-1)?.id ?? null, one);
    }
  } else if (given && typeof given === "object") {
    parseTree(given, value.shown, result);
  } else {
    throw new Error("it holds no conversation");
  }
  if (typeof value?.title === "string" && value.title) result.title = value.title;
  if (typeof value?.updated === "number") result.updated = value.updated;
  return result;
}

function addParsed(result, parent, one) {
  const roles = ["user", "assistant"];
  if (!roles.includes(one?.role) || typeof one.content !== "string") {
    throw new Error("a message must have the role user or assistant, and a text");
  }
  const message = add(result, parent, one.role, one.content, one.finish ?? "stop");
  message.tokens = Number(one.tokens ?? 0);
  return message;
}

function parseTree(given, shown, result) {
  const ids = new Map([[null, null]]); // ids in the file to new ones
  for (const [id, one] of Object.entries(given)) {
    if (!ids.has(one?.parent)) throw new Error(`the message ${id} comes before its parent`);
    ids.set(id, addParsed(result, ids.get(one.parent), one).id);
  }
  for (const [id, one] of [[null, { shown }], ...Object.entries(given)]) {
    const child = result.messages[ids.get(one.shown ?? null)];
    if (child?.parent === ids.get(id)) show(result, child);
  }
}

function parseState(state) {
  return typeof state?.id === "string"
    ? { id: state.id, name: String(state.name), tokens: Number(state.tokens), model: state.model }
    : null;
}
