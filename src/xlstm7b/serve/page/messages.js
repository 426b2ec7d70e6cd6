// The list of messages: their texts and buttons, an answer that grows, and scrolling.

import { button, copyButton, counted, element, find, isSend } from "./dom.js";
import { openEnd, render, renderAll, rendered, showBlocks } from "./markdown.js";
import { branches, isRunning, path, show as showBranch } from "./tree.js";

const RENDER_EVERY = 250; // ms between two renderings of a growing answer, at least
const NEAR_END = 40; // pixels

const list = find("messages");
const articles = new WeakMap(); // by message
const editors = new WeakMap(); // by message: the form in its place
const growing = new WeakMap(); // by message, while it grows
let actions = {}; // what the buttons of a message do
let isFollowing = true; // the end is in view

export function onAction(callbacks) {
  actions = callbacks;
}

// `own`: the answer that this tab writes.
export function showMessages(conversation, own = null) {
  const focused = document.activeElement, place = focusedButton();
  const messages = path(conversation);
  list.replaceChildren(...messages.map((one, index) =>
    toArticle(conversation, one, index === messages.length - 1, one === own)));
  if (list.contains(focused)) focused.focus({ preventScroll: true }); // an edit goes on
  else restore(place);
  showRendered(messages.filter((one) =>
    one.role === "assistant" && !isRunning(one) && rendered(one.content) === null));
}

export function scrollToEnd() {
  isFollowing = find("jump").hidden = true;
  list.scrollTop = list.scrollHeight;
}

// The body of a message in view.
function bodyOf(message) {
  const article = articles.get(message);
  return article?.isConnected ? article.querySelector(".body") : null;
}

async function showRendered(messages) {
  const all = await renderAll(messages.map((one) => one.content));
  messages.forEach((message, index) => {
    const body = bodyOf(message);
    if (body && all[index] !== null) showAsHtml(body, all[index]);
  });
  if (isFollowing) scrollToEnd();
}

function showAsHtml(body, blocks, kept) {
  if (body.classList.contains("plain")) body.replaceChildren();
  body.classList.remove("plain");
  showBlocks(body, blocks, kept);
}

function toArticle(conversation, message, isLast, isOwn) {
  const isAnswer = message.role === "assistant", isGrowing = isRunning(message);
  const name = isAnswer ? "Model" : "You";
  const article = element("article", "", { className: message.role }, element("h2", name));
  articles.set(message, article);
  if (!isGrowing) stopGrowing(message);
  if (editors.has(message)) {
    article.append(editors.get(message));
    return article;
  }
  const body = element("div", message.content, { className: "body plain", dir: "auto" });
  const blocks = isAnswer && !isGrowing ? rendered(message.content) : null;
  if (blocks !== null) showAsHtml(body, blocks);
  const ariaLabel = `${name}: actions`;
  const row = element("div", "", { className: "actions", role: "group", ariaLabel });
  const all = branches(conversation, message);
  if (all.length > 1) row.append(toBranches(conversation, message, all));
  row.append(copyButton(() => message.content), toButton("Edit", message));
  if (isAnswer) row.append(toButton("Regenerate", message), toButton("Fork", message));
  else if (isLast) row.append(toButton("Try again", message));
  row.append(toButton("Delete", message));
  article.append(body);
  article.classList.toggle("growing", isGrowing);
  if (isAnswer && !isOwn && message.finish !== "stop") article.append(toNotice(message, isLast));
  article.append(row);
  return article;
}

function toButton(name, message) {
  return button(name, () => actions[name](message), { data: { action: name } });
}

function toNotice(message, isLast) {
  if (isRunning(message)) {
    return element("p", "Another tab is writing this answer.", { className: "notice" });
  }
  const cut = `Cut at ${counted(message.tokens, "token")}`;
  const reasons = { length: cut, abort: "Stopped", error: "Cut off by an error" };
  const notice = element("p", reasons[message.finish] ?? "Incomplete", { className: "notice" });
  if (isLast) notice.append(" · ", toButton("Continue", message));
  return notice;
}

function toBranches(conversation, message, all) {
  const index = all.indexOf(message);
  const go = (step) => {
    showBranch(conversation, all[index + step]);
    actions.Branch();
  };
  const options = (step, label) => ({
    ariaLabel: label, disabled: !all[index + step], data: { action: label },
  });
  const ariaLabel = `Branch ${index + 1} of ${all.length}`;
  return element("span", "", { className: "branches" },
    button("‹", () => go(-1), options(-1, "Previous branch")),
    element("span", `${index + 1}/${all.length}`, { role: "note", ariaLabel }),
    button("›", () => go(1), options(1, "Next branch")));
}

// The keyboard's place survives that the list is built again.
function focusedButton() {
  const focused = document.activeElement;
  const article = focused?.closest?.("#messages article");
  return article && { index: [...list.children].indexOf(article), action: focused.dataset.action };
}

function restore(focus) {
  const article = list.children[focus?.index];
  const same = article?.querySelector(`[data-action="${focus.action}"]:not(:disabled)`);
  const other = article?.querySelector(".branches button:not(:disabled)");
  (same ?? other)?.focus({ preventScroll: true });
}

// Replaces a message by a field until it is closed. `done` is called with the new text.
export function edit(message, action, done) {
  const field = element("textarea", "", {
    value: message.content, ariaLabel: "Edit the message", dir: "auto",
  });
  const close = () => {
    editors.delete(message);
    actions.Show();
    articles.get(message).querySelector("[data-action=Edit]").focus();
  };
  const form = element("form", "", {
    className: "edit",
    onsubmit: (event) => {
      event.preventDefault();
      if (list.ariaBusy === "true") return;
      const text = field.value.trim();
      close();
      if (text && text !== message.content) done(text);
    },
    onkeydown: (event) => {
      if (event.target === field && isSend(event)) {
        event.preventDefault();
        form.requestSubmit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    },
  }, field, element("div", "", { className: "row" },
    element("button", action, { className: "primary" }), button("Cancel", close)));
  editors.set(message, form);
  actions.Show();
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight / 2)}px`;
  field.focus();
}

// Shows more of an answer that is being written, here or in another tab.
export function grow(message) {
  if (!growing.has(message)) growing.set(message, new GrowingMessage(message));
  growing.get(message).update();
}

function stopGrowing(message) {
  growing.get(message)?.finish();
  growing.delete(message);
}

// Shows a growing answer: new text in the next frame, as HTML a few times a second. Only its last
// two blocks are rendered again: new text does not change earlier ones.
class GrowingMessage {
  constructor(message) {
    this.message = message;
    this.frame = 0;
    this.nextRender = 0; // time
    this.isRendering = this.isDone = false;
    this.tail = element("span", "", { className: "tail" }); // text that is not rendered yet
    this.reset();
  }

  reset() {
    this.rendered = 0; // characters that are shown as HTML
    this.settled = { characters: 0, blocks: 0 }; // at the start, not rendered again
  }

  update() {
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const body = bodyOf(this.message);
    if (!body) return; // another conversation is in view
    const text = this.message.content;
    if (!this.tail.isConnected) {
      this.tail.replaceChildren(document.createTextNode(""));
      if (body.classList.contains("plain")) {
        this.reset();
        body.replaceChildren(this.tail);
      } else {
        const end = openEnd(body, text[this.rendered - 1] === "\n");
        // HTML has no white space at the end, except in code.
        if (!end.matches("pre code")) this.rendered = text.slice(0, this.rendered).trimEnd().length;
        end.append(this.tail);
      }
    }
    const shown = this.tail.firstChild, length = shown.length + this.rendered;
    if (length < text.length) shown.appendData(text.slice(length));
    if (isFollowing) list.scrollTop = list.scrollHeight;
    if (!this.isRendering && performance.now() >= this.nextRender) this.render(text, this.settled);
  }

  async render(text, settled) {
    this.isRendering = true;
    const began = performance.now();
    const rest = text.slice(settled.characters), blocks = await render(rest);
    // A slow server is asked less often.
    const now = performance.now();
    this.nextRender = now + Math.max(RENDER_EVERY, 3 * (now - began));
    this.isRendering = false;
    const body = bodyOf(this.message);
    if (this.isDone || blocks === null || !body) return;
    if (!body.contains(this.tail) || settled !== this.settled) { // it was shown anew meanwhile
      this.update();
      return;
    }
    this.tail.remove();
    showAsHtml(body, blocks, settled.blocks);
    this.rendered = text.length;
    if (blocks.length > 2) {
      const lines = rest.split("\n").slice(0, blocks.at(-2).line);
      this.settled = {
        characters: settled.characters + lines.reduce((sum, line) => sum + line.length + 1, 0),
        blocks: settled.blocks + blocks.length - 2,
      };
    }
    this.update();
  }

  finish() {
    cancelAnimationFrame(this.frame);
    this.isDone = true;
  }
}

function watchEnd() {
  isFollowing = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
  find("jump").hidden = isFollowing;
}

list.addEventListener("scroll", watchEnd, { passive: true });
new ResizeObserver(() => { // a phone's keyboard, or a longer draft
  if (isFollowing) scrollToEnd();
  else watchEnd();
}).observe(list);
find("jump").addEventListener("click", () => {
  scrollToEnd();
  find("input").focus();
});
