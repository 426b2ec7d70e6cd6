// What this browser keeps: conversations, each under its own key so that tabs do not overwrite each
// other, settings, and until the tab is closed the conversation in view and the API key.

import { parse } from "./tree.js";

const PREFIX = "xlstm7b/"; // and a conversation's id
let complain = () => {};

export function onFull(callback) {
  complain = callback;
}

function attempt(work) {
  try {
    return work();
  } catch { /* storage is disabled, full, or holds something else */ }
}

export function readConversations() {
  const keys = attempt(() => Object.keys(localStorage)) ?? [];
  const found = keys.filter((key) => key.startsWith(PREFIX))
    .map((key) => attempt(() => parse(JSON.parse(localStorage.getItem(key)), true)));
  return found.filter(Boolean);
}

export function saveConversation(conversation) {
  const isEmpty = conversation.shown === null && !conversation.draft && !conversation.state;
  if (isEmpty) removeConversation(conversation);
  else write(localStorage, PREFIX + conversation.id, JSON.stringify(conversation));
}

export function removeConversation({ id }) {
  attempt(() => localStorage.removeItem(PREFIX + id));
}

// Calls back when another tab has changed conversations.
export function onOtherTab(callback) {
  addEventListener("storage", (event) => {
    if (event.key === null || event.key.startsWith(PREFIX)) callback();
  });
}

export function readSetting(name) {
  return attempt(() => JSON.parse(localStorage.getItem(`xlstm7b-${name}`))) ?? null;
}

export function saveSetting(name, value) {
  write(localStorage, `xlstm7b-${name}`, JSON.stringify(value));
}

export function readForTab(name) {
  return attempt(() => sessionStorage.getItem(`xlstm7b-${name}`)) ?? "";
}

export function saveForTab(name, value) {
  write(sessionStorage, `xlstm7b-${name}`, value);
}

function write(storage, key, value) {
  try {
    storage.setItem(key, value);
  } catch {
    complain("The browser's storage is full: new messages are lost when this page is closed. "
      + "Export conversations, then delete some.");
  }
}

// Conversations as the text of a file, and back.
export function exportConversations(conversations) {
  return JSON.stringify({ format: "xlstm7b-conversations", conversations }, null, 1);
}

export function importConversations(text) {
  const value = JSON.parse(text);
  const given = value?.conversations ?? [value];
  if (!Array.isArray(given)) throw new Error("it holds no conversations");
  return given.map((one) => parse(one));
}

