// Requests to the server. A failure is an Error with a readable message. Its `status` is the HTTP
// status, 0 without an answer, and its `param` the field that the server refuses.

let key = "";

export function useKey(value) {
  key = value;
}

class ServerError extends Error {
  constructor(message, status, param = null) {
    super(message);
    Object.assign(this, { status, param });
  }
}

const LOST = "The connection was lost.";

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
  const reason = content?.error?.message ?? `The server answered with error ${response.status}`;
  const seconds = response.headers.get("retry-after");
  const message = seconds ? `${reason}: try again in ${seconds} s` : reason;
  throw new ServerError(message, response.status, content?.error?.param);
}

export async function getJson(path, options) {
  return (await callServer(path, options)).json();
}

// Calls `receive` with every event of a streamed answer.
export async function stream(path, body, signal, receive) {
  const response = await callServer(path, { body: { ...body, stream: true }, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch(unlessAborted(LOST));
    if (done) throw new ServerError(LOST, 0);
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw new ServerError(content.error.message, 500, content.error.param);
      receive(content);
    }
  }
}

function unlessAborted(message) {
  return (error) => {
    throw error.name === "AbortError" ? error : new ServerError(message, 0);
  };
}
