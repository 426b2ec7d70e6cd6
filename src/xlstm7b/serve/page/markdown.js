// Markdown as HTML. The server renders it, so that no library is needed here.

import { copyButton, element } from "./dom.js";
import { getJson } from "./server.js";

const MAX_CHARACTERS = 1 << 18; // of a request; the server's limit
const MAX_CACHED = 500;
const cache = new Map(); // text: its blocks, each {line, html}
const sources = new WeakMap(); // a block's element: its HTML as the server sent it

// The only place where HTML is made from text. The server has escaped all that is not Markdown.
const policy = window.trustedTypes?.createPolicy("markdown", { createHTML: (html) => html })
  ?? { createHTML: (html) => html };

// The blocks of a text; null if the server cannot render it now.
export async function render(text) {
  return (await renderAll([text]))[0];
}

// All texts in as few requests as possible.
export async function renderAll(texts) {
  const missing = [...new Set(texts)].filter((text) => !cache.has(text));
  for (let start = 0; start < missing.length;) {
    const batch = [];
    for (let length = 0; start < missing.length; start++) {
      length += missing[start].length;
      if (batch.length && length > MAX_CHARACTERS) break;
      batch.push(missing[start]);
    }
    const all = await getJson("markdown", { body: { texts: batch } })
      .then((content) => content.texts, () => []);
    all.forEach((blocks, index) => remember(batch[index], blocks));
  }
  return texts.map((text) => cache.get(text) ?? null);
}

function remember(text, blocks) {
  if (cache.size >= MAX_CACHED) cache.delete(cache.keys().next().value);
  cache.set(text, blocks);
}

// The blocks of a text that was rendered before; null if they are not known.
export function rendered(text) {
  return cache.get(text) ?? null;
}

// Shows blocks in an element, after its first `kept` ones. Those that have not changed are left
// alone, so that a long answer costs no more to show than its last paragraph.
export function showBlocks(target, blocks, kept = 0) {
  const old = [...target.childNodes].slice(kept);
  let same = 0;
  while (same < blocks.length && sources.get(old[same]) === blocks[same].html) same++;
  for (const one of old.slice(same)) one.remove();
  for (const { html } of blocks.slice(same)) {
    const template = document.createElement("template");
    template.innerHTML = policy.createHTML(html);
    const block = decorate(template.content.firstElementChild);
    sources.set(block, html);
    target.append(block);
  }
}

// Code gets a line with its language and a copy button. Wide tables scroll.
function decorate(block) {
  block.dir = "auto";
  if (block.tagName === "PRE") return decorateCode(block);
  if (block.tagName === "TABLE") {
    const properties = { className: "table", tabIndex: 0, role: "region", ariaLabel: "Table" };
    return element("div", "", properties, block);
  }
  for (const code of block.querySelectorAll("pre")) {
    const place = document.createComment("");
    code.replaceWith(place);
    place.replaceWith(decorateCode(code));
  }
  return block;
}

function decorateCode(code) {
  code.dir = "ltr";
  code.tabIndex = 0; // it scrolls, also with the keyboard
  code.ariaLabel = "Code";
  const head = element("div", "", { className: "code-head", dir: "ltr" },
    element("span", code.dataset.language || "text"),
    copyButton(() => code.textContent, { aria: { label: "Copy code" } }));
  return element("figure", "", { className: "code" }, head, code);
}

// Where text goes that was not rendered yet: the place at which the rendered text ends. Code always
// ends with a new line there; it is taken off unless the text has it.
export function openEnd(target, hasNewLine) {
  const inner = "p, li, ul, ol, blockquote, h1, h2, h3, h4, h5, h6, figure, pre, pre > code, "
    + ".table, table, tbody, tr, td";
  let place = target;
  while (place.lastElementChild?.matches(inner)) place = place.lastElementChild;
  let last = place.lastChild;
  while (last?.lastChild) last = last.lastChild;
  if (!hasNewLine && place.matches("pre code") && last) last.data = last.data.replace(/\n$/, "");
  return place;
}
