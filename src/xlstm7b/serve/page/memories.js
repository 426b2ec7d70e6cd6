// Memories: states that the server has saved. Each is what the model remembers of a text, in a file
// whose size does not depend on the text's length. Any number of conversations can start from one.

import {
  announce, button, counted, download, element, Fault, find, toFileName, toSentence, toSize,
} from "./dom.js";
import { ask } from "./dialog.js";
import { callServer, getBlob, getJson, stream } from "./server.js";
import { systemMessage } from "./settings.js";

const dialog = find("memories"), list = find("memory-list"), fault = find("memory-error");
const note = find("document"); // about a document that is read while the dialog is closed
let model = null; // its id
let start = () => {}; // begins a conversation from a memory
let reading = null; // an AbortController while a document is read

export function onStart(callback) {
  start = callback;
}

// `id` is the model that reads documents.
export async function openMemories(id) {
  model = id;
  list.replaceChildren();
  find("no-memories").hidden = note.hidden = true;
  dialog.showModal();
  await attempt(showList);
}

async function attempt(work) {
  fault.textContent = "";
  try {
    return await work();
  } catch (error) {
    fault.textContent = toSentence(error);
    return null;
  }
}

async function showList() {
  const states = [];
  for (let more = true; more;) {
    const after = states.length ? `&after=${states.at(-1).id}` : "";
    const page = await getJson(`v1/states?limit=1000${after}`);
    states.push(...page.data);
    more = page.has_more;
  }
  list.replaceChildren(...states.map(toItem));
  find("no-memories").hidden = states.length > 0;
}

function toItem(state) {
  const name = nameOf(state);
  const when = new Date(state.created * 1000)
    .toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const faults = { damaged: "damaged", other_model: "of another model" };
  const length = faults[state.status] ?? counted(state.tokens, "token");
  const facts = `${length} · ${toSize(state.bytes)} · ${when}`;
  const act = (label, work, properties) =>
    button(label, () => attempt(work), { ariaLabel: `${label}: ${name}`, ...properties });
  const actions = [
    act("Rename", () => rename(state)),
    act("Download", () => save(state)),
    act("Delete", () => remove(state)),
  ];
  if (state.status === "ok") {
    actions.unshift(act("Start", () => {
      dialog.close();
      start(toStart(state));
    }, { className: "primary" }));
  }
  return element("li", "", {},
    element("div", "", { className: "facts" }, element("strong", name), element("span", facts)),
    element("div", "", { className: "row" }, ...actions));
}

const nameOf = (state) => state.name || "Unnamed memory";
const toStart = (state) =>
  ({ id: state.id, name: nameOf(state), tokens: state.tokens, model: state.model });

async function rename(state) {
  const name = await ask({ title: "Rename the memory", action: "Rename", value: state.name });
  if (!name) return;
  await callServer(`v1/states/${state.id}`, { method: "PATCH", body: { name } });
  await showList();
}

async function save(state) {
  const content = await getBlob(`v1/states/${state.id}/content`);
  download(toFileName(nameOf(state), ".safetensors"), content);
}

async function remove(state) {
  const text = "Conversations that start from it cannot go on.";
  const title = `Delete “${nameOf(state)}”?`;
  if (!await ask({ title, text, action: "Delete", isDanger: true })) return;
  await callServer(`v1/states/${state.id}`, { method: "DELETE" });
  await showList();
}

// Saves what the model remembers of a conversation. `request` has its messages.
export async function saveMemory(request, model, name) {
  return getJson("v1/states", { body: { ...request, model, name } });
}

// Reads a text file into a memory and starts a conversation from it. If the dialog is closed
// meanwhile, a note tells how far the reading is, and the view stays.
async function readDocument(file) {
  if (!file) return;
  const text = await decode(file);
  if (reading) throw new Fault("Only one document is read at a time: wait for it, or cancel it.");
  reading = new AbortController();
  find("reading").hidden = false;
  note.className = "";
  note.onclick = () => {
    note.hidden = true;
    dialog.showModal();
  };
  showProgress(file.name, 0, 0);
  let saved = null;
  try {
    const receive = (event) => {
      if (event.object === "state") saved = event;
      else showProgress(file.name, event.tokens_read, event.tokens_total);
    };
    const content = [systemMessage(), text].filter(Boolean).join("\n\n");
    const read = (role) => stream("v1/states",
      { model, name: file.name.slice(0, 200), messages: [{ role, content }] },
      reading.signal, receive);
    await read("system").catch((error) => {
      if (error.param !== "messages") throw error;
      return read("user"); // this chat template has no system message
    });
    if (!saved) throw new Fault("the server did not save it.");
  } catch (error) {
    const reason = error.name === "AbortError" ? "you cancelled it." : toSentence(error);
    note.textContent = `${file.name} was not read: ${reason}`;
    note.className = "fault";
    note.onclick = () => { note.hidden = true; };
    throw new Fault(note.textContent);
  } finally {
    reading = null;
    find("reading").hidden = true;
  }
  announce(`${file.name} was read: ${counted(saved.tokens, "token")}.`);
  const begin = () => {
    note.hidden = true;
    dialog.close();
    start(toStart(saved));
  };
  if (dialog.open) return begin();
  note.textContent = `${file.name} was read. Start a conversation from it`;
  note.onclick = begin;
}

dialog.addEventListener("close", () => { note.hidden = reading === null; });

async function decode(file) {
  try {
    const content = await file.arrayBuffer();
    const text = new TextDecoder("utf-8", { fatal: true }).decode(content);
    if (text.trim() && !text.includes("\0")) return text;
  } catch { /* it is gone, or not UTF-8 */ }
  throw new Fault(`“${file.name}” is not a text file, or it is empty. `
    + "Convert PDF and Word files to text first.");
}

function showProgress(name, read, total) {
  const bar = find("reading-bar");
  if (total) Object.assign(bar, { max: total, value: read });
  else bar.removeAttribute("value"); // it moves to and fro
  find("reading-text").textContent = note.textContent = total
    ? `Reading ${name}: ${read.toLocaleString()} of ${counted(total, "token")}`
    : `Sending ${name} …`;
}

async function upload(file) {
  if (!file) return;
  const name = file.name.replace(/\.safetensors$/, "").slice(0, 200);
  await callServer(`v1/states?name=${encodeURIComponent(name)}`, { method: "PUT", file });
  await showList();
}

// A hidden file field: its button opens it, and the same file can be chosen twice.
function onFile(id, work) {
  const field = find(id);
  field.addEventListener("change", () => {
    const [file] = field.files;
    attempt(() => work(file));
    field.value = "";
  });
}

onFile("document-file", readDocument);
onFile("memory-file", upload);
find("reading-stop").addEventListener("click", () => reading?.abort());
