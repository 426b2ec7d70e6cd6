// Requests to the server. A failure is an Error with a readable message and the HTTP status as its
// cause.

export async function callServer(path, key, options = {}) {
  // Relative to the page, which a proxy may serve under a path. Without the page's user name and
  // password, because fetch refuses URLs that have them.
  const response = await fetch(new URL(path, location.origin + location.pathname), {
    ...options,
    headers: { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) },
  }).catch(unlessAborted("The server does not answer."));
  if (response.ok) return response;
  const content = await response.json().catch(() => null); // an answer of a proxy may not be JSON
  const reason = content?.error?.message ?? `The server answered with error ${response.status}`;
  const seconds = response.headers.get("retry-after");
  const message = seconds ? `${reason}: try again in ${seconds} s` : reason;
  throw new Error(message, { cause: response.status });
}

// Calls `receive` with every event of a streamed answer.
export async function stream(body, key, signal, receive) {
  const response = await callServer("v1/chat/completions", key, {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const lost = "The connection was lost.";
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read().catch(unlessAborted(lost));
    if (done) throw new Error(lost);
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

function unlessAborted(message) {
  return (error) => {
    throw error.name === "AbortError" ? error : new Error(message);
  };
}
