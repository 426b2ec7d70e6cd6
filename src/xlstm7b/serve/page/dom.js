// Small helpers for elements, keys, sizes, files, the clipboard and errors.

export const find = (id) => document.getElementById(id);

// element("button", "Copy", { onclick: … }, child, …). Text is never read as HTML.
export function element(name, text = "", properties = {}, ...children) {
  const created = document.createElement(name);
  created.textContent = text;
  const { data = {}, aria = {}, ...rest } = properties;
  Object.assign(created.dataset, data);
  for (const [key, value] of Object.entries(aria)) created.setAttribute(`aria-${key}`, value);
  Object.assign(created, rest);
  created.append(...children);
  return created;
}

export function button(text, onclick, properties = {}) {
  return element("button", text, { type: "button", onclick, ...properties });
}

// On a phone Enter breaks the line: its keyboard has no Shift+Enter.
export const touch = matchMedia("(pointer: coarse)");

// Whether a key in a text field sends the text.
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && !touch.matches;
}

// An error whose message is a sentence for the reader.
export class Fault extends Error {}

export function toSentence(error) {
  if (error instanceof Fault) return error.message;
  console.error(error);
  return "Something went wrong in this page. Reload it and try again.";
}

// A number with its noun: "1 token", "2,000 tokens".
export function counted(count, noun) {
  return `${count.toLocaleString()} ${noun}${count === 1 ? "" : "s"}`;
}

export function toSize(bytes) {
  if (bytes >= 1e9) return `${(bytes / 1e9).toFixed(1)} GB`;
  return bytes < 1e6 ? `${(bytes / 1e3).toFixed(0)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

export function download(name, blob) {
  const link = element("a", "", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export function toFileName(title, ending) {
  const words = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${words.slice(0, 60) || "chat"}${ending}`;
}

// Browsers have a clipboard only on HTTPS and localhost; the old way works everywhere.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", "", { value: text, className: "hidden" });
  const focused = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

// A button that copies what `text()` returns, and says that it did.
export function copyButton(text, properties = {}) {
  const created = button("Copy", async () => {
    const copied = await copy(text()).then(() => true, () => false);
    created.textContent = copied ? "Copied" : "Not copied";
    announce(created.textContent);
    setTimeout(() => { created.textContent = "Copy"; }, 1500);
  }, properties);
  return created;
}

// Screen readers read this out.
export function announce(text) {
  find("announcer").textContent = text;
}
