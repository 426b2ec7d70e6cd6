// Questions to the reader: one dialog, with a text field if there is something to type.

import { find } from "./dom.js";

const dialog = find("question"), field = find("question-field");

// The typed text, or true; null if the reader cancels. `value` is the field's text; null: no field.
export function ask({ title, text = "", action, value = null, secret = false, isDanger = false }) {
  find("question-title").textContent = title;
  find("question-text").textContent = text;
  find("question-action").textContent = action;
  find("question-action").className = isDanger ? "danger" : "primary";
  field.hidden = value === null;
  field.type = secret ? "password" : "text";
  field.value = value ?? "";
  field.ariaLabel = title;
  dialog.returnValue = "";
  dialog.showModal();
  if (value === null) find("question-action").focus();
  else field.select();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      const focused = document.activeElement; // Chromium gives it the focus, but no caret
      focused.blur();
      focused.focus();
      const answer = value === null ? true : field.value.trim();
      resolve(dialog.returnValue === "yes" ? answer : null);
    };
  });
}

// A click beside a dialog closes it, as Esc does.
for (const one of document.querySelectorAll("dialog")) {
  one.addEventListener("click", (event) => {
    if (event.target === one) one.close();
  });
  one.querySelector(".close")?.addEventListener("click", () => one.close());
}
