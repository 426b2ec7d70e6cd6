// Requests to the server. A failure is a fault with a sentence for the reader. Its `status` is the
// HTTP status, 0 without an answer, and its `param` the field that the server refuses.

import { Fault, toSize } from "./dom.js";
import { labelOf } from "./settings.js";

let key = "";

export function useKey(value) {
  key = value;
}

class ServerFault extends Fault {
  constructor(message, status, param = null) {
    super(message);
    Object.assign(this, { status, param });
  }
}

const LOST = "The connection was lost.";
const UNREADABLE = "The server's answer cannot be read.";
const CODES = {
  context_length_exceeded: "This is too long for the model. Delete messages, or begin a new "
    + "conversation.",
  model_not_found: "This model is no longer on the server.",
  state_not_found: "This memory is no longer on the server.",
  states_full: "The server has no room for another memory. Delete one first.",
};
const STATUSES = {
  408: "Sending took too long. Try again.",
  409: "This memory is damaged, or belongs to another model.",
  413: "This is too long for the server.",
  429: "The server is busy.",
  502: "The server does not answer.",
  503: "The server is starting or stopping.",
  504: "The server does not answer.",
  507: "The server could not save the memory. Its disk may be full.",
};

// What an error of the server means for the reader. The server's own words are for programs.
function explain(status, error, isFile = false) {
  const { message = "", param = null, code } = error ?? {}, label = labelOf(param);
  console.warn(`error ${status}: ${message}`);
  if (CODES[code]) return CODES[code];
  if (status === 401) return key ? "This API key is wrong." : "This server needs an API key.";
  if (status === 400) {
    if (isFile) return "This file is not a memory of this server's model.";
    if (label) return `The server does not allow this “${label}”: change it in Settings.`;
    if (param === "messages") return "The model's chat template does not allow these messages.";
  }
  const bytes = status === 413 && message.match(/(\d+) bytes/)?.[1];
  if (bytes) return `This is too long for the server: it takes at most ${toSize(Number(bytes))}.`;
  if (STATUSES[status]) return STATUSES[status];
  const what = status < 500 ? "The server does not allow this" : "The server has failed";
  return `${what} (error ${status}).`;
}

// `body`, if any, is sent as JSON, and `file` as it is. Returns the response if its status is 2xx.
export async function callServer(path, { body, file, method, signal } = {}) {
  // Relative to the page, which a proxy may serve under a path. Without the page's user name and
  // password, because fetch refuses URLs that have them.
  const response = await fetch(new URL(path, location.origin + location.pathname), {
    method: method ?? (body ? "POST" : "GET"),
    signal,
    body: file ?? (body && JSON.stringify(body)),
    headers: {
      ...(body && { "content-type": "application/json" }),
      ...(file && { "content-type": "application/octet-stream" }),
      ...(key && { authorization: `Bearer ${key}` }),
    },
  }).catch(unlessAborted("The server does not answer."));
  if (response.ok) return response;
  const content = await response.json().catch(() => null); // an answer of a proxy may not be JSON
  const error = content?.error;
  const seconds = response.headers.get("retry-after");
  const sentence = explain(response.status, error, Boolean(file));
  const message = seconds ? `${sentence} Try again in ${seconds} s.` : sentence;
  throw new ServerFault(message, response.status, error?.param);
}

export async function getJson(path, options) {
  return (await callServer(path, options)).json().catch(unlessAborted(UNREADABLE));
}

export async function getBlob(path) {
  return (await callServer(path)).blob().catch(unlessAborted(LOST));
}

// Calls `receive` with every event of a streamed answer, until [DONE].
export async function stream(path, body, signal, receive) {
  const response = await callServer(path, { body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [], name = "", isAfterReturn = false;
  for (;;) {
    const { value, done } = await reader.read().catch(unlessAborted(LOST));
    if (done) throw new ServerFault(LOST, 0);
    // A line ends with CR LF, LF or CR. After a CR at the end of a piece, the LF may still come.
    const piece = isAfterReturn && value.startsWith("\n") ? value.slice(1) : value;
    const lines = (rest + piece).split(/\r\n|\r|\n/);
    if (value) isAfterReturn = value.endsWith("\r");
    rest = lines.pop();
    for (const line of lines) {
      const [, field, content] = line.match(/^([^:]*):? ?(.*)$/s); // a comment has no field
      if (field === "data") data.push(content);
      if (field === "event") name = content;
      if (line) continue;
      const text = data.join("\n");
      if (text === "[DONE]") return;
      if (text && ["", "message", "error"].includes(name)) receive(parseEvent(text));
      data = [];
      name = "";
    }
  }
}

function parseEvent(data) {
  let content = null;
  try {
    content = JSON.parse(data);
  } catch {
    throw new ServerFault(UNREADABLE, 500);
  }
  if (!content.error) return content;
  const { type, param } = content.error;
  const status = type === "rate_limit_error" ? 429 : param ? 400 : 500;
  throw new ServerFault(explain(status, content.error), status, param);
}

function unlessAborted(message) {
  return (error) => {
    throw error.name === "AbortError" ? error : new ServerFault(message, 0);
  };
}
