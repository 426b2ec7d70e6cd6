// The list of conversations: search, and a menu for each. On a phone it is a drawer.

import { button, element, find } from "./dom.js";
import { FORK, isRunning, matches } from "./tree.js";

const list = find("conversations"), search = find("search"), menu = find("menu");
const drawer = find("sidebar"), narrow = matchMedia("(max-width: 50rem)");
let handlers = {}; // open, and what the menu's items do
let shown = { conversations: [], current: null };

export function onSidebar(callbacks) {
  handlers = callbacks;
}

export function showConversations(conversations, current) {
  shown = { conversations, current };
  const words = search.value.trim();
  const found = conversations.filter((one) => !words || matches(one, words))
    .sort((a, b) => b.updated - a.updated);
  list.replaceChildren(...found.map(toItem));
  find("nothing-found").hidden = found.length > 0;
}

export function nameOf(conversation) {
  return conversation.title || (conversation.state ? conversation.state.name : "New conversation");
}

// A title as one line. If it is too long for its place, its end is cut, but not “(fork 2)”.
export function toLine(name) {
  const [end = ""] = name.match(FORK) ?? [];
  const start = name.slice(0, name.length - end.length);
  return [element("span", start, { className: "name", dir: "auto" }), element("span", end)];
}

function toItem(conversation) {
  const name = nameOf(conversation);
  const open = button("", () => {
    closeDrawer();
    handlers.open(conversation);
  }, { className: "open", title: name });
  open.append(...toLine(name));
  if (conversation === shown.current) open.setAttribute("aria-current", "page");
  const item = element("li", "", { data: { id: conversation.id } }, open);
  if (Object.values(conversation.messages).some(isRunning)) {
    open.append(element("span", "answering", { className: "dot" }));
  }
  item.append(button("⋯", (event) => openMenu(event.currentTarget, conversation), {
    className: "more", ariaLabel: `Menu of ${name}`, ariaHasPopup: "menu",
  }));
  return item;
}

function openMenu(anchor, conversation) {
  const items = ["Rename", "Export", "Delete"].map((name) => button(name, () => {
    menu.hidePopover();
    handlers[name](conversation);
  }, { role: "menuitem" }));
  menu.replaceChildren(...items);
  menu.showPopover();
  const place = anchor.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, innerWidth - menu.offsetWidth - 8));
  const below = place.bottom + 4;
  const top = below + menu.offsetHeight > innerHeight ? place.top - menu.offsetHeight - 4 : below;
  Object.assign(menu.style, { left: `${left}px`, top: `${top}px` });
  items[0].focus();
  menu.onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = items.indexOf(document.activeElement);
    items[(at + step + items.length) % items.length].focus();
  };
  menu.ontoggle = (event) => {
    if (event.newState === "closed" && anchor.isConnected) anchor.focus();
  };
}

export function closeDrawer() {
  setDrawer(false);
}

function setDrawer(isOpen) {
  document.body.classList.toggle("drawer", isOpen);
  find("drawer-open").ariaExpanded = isOpen;
  drawer.inert = narrow.matches && !isOpen;
  find("content").inert = narrow.matches && isOpen;
  if (isOpen) find("new").focus();
}

find("drawer-open").addEventListener("click", () => setDrawer(true));
find("scrim").addEventListener("click", closeDrawer);
narrow.addEventListener("change", closeDrawer);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.body.classList.contains("drawer")) {
    event.stopImmediatePropagation();
    closeDrawer();
    find("drawer-open").focus();
  }
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (narrow.matches) setDrawer(true);
    search.focus();
  }
});
search.addEventListener("input", () => {
  showConversations(shown.conversations, shown.current);
});
closeDrawer();
