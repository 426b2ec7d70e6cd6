// Answers: the request for one, its stream, and how fast it comes. Several conversations can have
// an answer under way at the same time.

import { announce, counted, Fault, find, toSize } from "./dom.js";
import { render } from "./markdown.js";
import { grow } from "./messages.js";
import { stream } from "./server.js";
import { sampling, systemMessage } from "./settings.js";
import { saveConversation } from "./store.js";
import { add, lineage, remove, show } from "./tree.js";

const running = new Map(); // conversation's id: {controller, message, status}

export function answerUnderWay(conversation) {
  return running.get(conversation.id) ?? null;
}

export function stop(conversation) {
  running.get(conversation.id)?.controller.abort();
}

// The messages as the server takes them. A memory has read the system message, or needs none.
export function toRequest(conversation, message) {
  const messages = lineage(conversation, message).map(({ role, content }) => ({ role, content }));
  const { state } = conversation;
  if (state) return { messages, state: state.id };
  const system = systemMessage();
  return { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
}

// Answers a user's message with a new branch. If nothing comes, the branch before is shown again.
export async function answer(conversation, question, model, changed) {
  const before = conversation.messages[question.shown];
  const message = add(conversation, question.id, "assistant", "", "abort");
  const error = await run(conversation, message, toRequest(conversation, question), model, changed);
  if (!message.content) {
    remove(conversation, message);
    if (before) show(conversation, before);
  }
  return error;
}

// Lets the model write on at the end of an answer.
export async function continueAnswer(conversation, message, model, changed) {
  const form = { continue_final_message: true, add_generation_prompt: false };
  const request = { ...toRequest(conversation, message), ...form };
  return run(conversation, message, request, model, changed);
}

// Streams into a message. Returns the failure, or null. `changed` is called at the start, with
// true, and whenever the status has changed.
async function run(conversation, message, request, model, changed) {
  const controller = new AbortController();
  const own = { controller, message, status: "Reading …" };
  const earlier = message.tokens, meter = startMeter(model.state_bytes);
  let failure = null;
  running.set(conversation.id, own);
  message.running = Date.now();
  changed(true);
  grow(message);
  const saving = setInterval(() => { // other tabs see the answer grow
    message.running = Date.now();
    saveConversation(conversation);
  }, 1000);
  const body = {
    model: conversation.state?.model ?? model.id, ...request, ...sampling(),
    stream_options: { include_usage: true },
  };
  try {
    await stream("v1/chat/completions", body, controller.signal, (event) => {
      const [choice] = event.choices;
      message.content += choice?.delta.content ?? "";
      message.finish = choice?.finish_reason ?? message.finish;
      const { tokens, status } = meter(event);
      message.tokens = earlier + tokens;
      own.status = status;
      grow(message);
      changed(false);
    });
  } catch (error) {
    message.finish = error.name === "AbortError" ? "abort" : "error";
    failure = error.name === "AbortError" ? null : error;
  }
  const isStopped = controller.signal.aborted;
  if (!message.content && !isStopped) failure ??= new Fault("The answer was empty.");
  await render(message.content); // so that the last text appears as HTML at once
  clearInterval(saving);
  message.running = 0;
  running.delete(conversation.id);
  conversation.updated = Date.now();
  if (message.content) announce(`The model answered: ${message.content}`);
  return failure;
}

// Counts the tokens of a stream. Its status is a line of text.
function startMeter(stateBytes) {
  const began = performance.now();
  let first = 0, chunks = 0, last = 0;
  return ({ choices, usage }) => {
    if (choices.length) last = performance.now();
    first ||= last;
    chunks += choices.length;
    const tokens = usage ? usage.completion_tokens : chunks;
    const speed = tokens > 1 ? (tokens - 1) / Math.max((last - first) / 1000, 1e-3) : 0;
    const parts = [counted(tokens, "token"), `${speed.toFixed(1)} tok/s`,
      `first after ${((first - began) / 1000).toFixed(2)} s`, `memory ${toSize(stateBytes)}`];
    if (usage) {
      const cached = usage.prompt_tokens_details.cached_tokens;
      parts.push(`${cached} of ${counted(usage.prompt_tokens, "prompt token")} cached`);
    }
    return { tokens, status: parts.join(" · ") };
  };
}

export function showStatus(text) {
  find("status").textContent = text;
}
