// Requests to the server; what goes wrong is an error in words, whose cause is the status if any.

export async function ask(path, key, options = {}) {
  // Beside the page, wherever a proxy has it; its own address may hold a password, with which
  // fetch would refuse it.
  const response = await fetch(new URL(path, location.origin + location.pathname), {
    ...options,
    headers: { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) },
  }).catch(unlessAborted("The server does not answer."));
  if (response.ok) return response;
  const content = await response.json().catch(() => null); // a proxy may have words of its own
  const said = content?.error?.message ?? `The server answered with an error, ${response.status}`;
  const seconds = response.headers.get("retry-after");
  const message = seconds ? `${said}: try again in ${seconds} s` : said;
  throw new Error(message, { cause: response.status });
}

// Every event of an answer as it comes.
export async function stream(body, key, signal, receive) {
  const response = await ask("v1/chat/completions", key, {
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
