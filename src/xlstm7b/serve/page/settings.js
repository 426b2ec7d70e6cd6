// Settings of the next answers. A value that is not allowed is explained beside its field and not
// used: the last good one stays.

import { button, element, find } from "./dom.js";
import { readSetting, saveSetting } from "./store.js";

const FIELDS = {
  system: {
    label: "System message", value: "", rows: 2,
    help: "Read before every conversation, except one that starts from a memory.",
  },
  temperature: {
    label: "Temperature", value: 0.8, min: 0, max: 5,
    help: "0 always takes the likeliest token. Higher values vary more.",
  },
  top_p: {
    label: "Top p", value: 0.95, min: 0.01, max: 1,
    help: "Only the likeliest tokens that make up this share. 1 turns it off.",
  },
  top_k: {
    label: "Top k", value: 0, min: 0, max: 100000, isWhole: true,
    help: "Only this many of the likeliest tokens. 0 turns it off.",
  },
  min_p: {
    label: "Min p", value: 0, min: 0, max: 1,
    help: "Only tokens at least this likely, relative to the likeliest. 0 turns it off.",
  },
  repetition_penalty: {
    label: "Repetition penalty", value: 1, min: 0.5, max: 2,
    help: "Above 1, tokens that are in the text become less likely. 1 turns it off.",
  },
  max_tokens: {
    label: "Max tokens", value: 1024, min: 1, max: 1 << 20, isWhole: true,
    help: "An answer is cut after this many tokens. It can be continued.",
  },
  seed: {
    label: "Seed", value: "", min: 0, max: Number.MAX_SAFE_INTEGER, isWhole: true, isOptional: true,
    help: "The same seed gives the same answer. Empty: another one each time.",
  },
};

const inputs = {};
let values = defaults();

function defaults() {
  return Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.value]));
}

// The fields of a request; the system message is apart.
export function sampling() {
  const { system, ...numbers } = values;
  return Object.fromEntries(Object.entries(numbers).filter(([, value]) => value !== ""));
}

export function labelOf(name) {
  return FIELDS[name]?.label;
}

export function systemMessage() {
  return values.system.trim();
}

// What is wrong with a field's text; "" if nothing is.
function fault(field, text) {
  if (field.rows || (field.isOptional && text === "")) return "";
  const number = Number(text);
  if (text === "" || Number.isNaN(number)) return "This must be a number.";
  if (field.isWhole && !Number.isInteger(number)) return "This must be a whole number.";
  if (number < field.min) return `This must be at least ${field.min}.`;
  return number > field.max ? `This must be at most ${field.max}.` : "";
}

function accept(name) {
  const field = FIELDS[name], { input, error } = inputs[name], text = input.value.trim();
  error.textContent = fault(field, text);
  input.ariaInvalid = error.textContent !== "";
  if (error.textContent) return;
  values[name] = field.rows ? input.value : text === "" ? "" : Number(text);
  saveSetting("settings", values);
  const changed = Object.keys(FIELDS).filter((one) => values[one] !== FIELDS[one].value);
  find("settings-open").classList.toggle("changed", changed.length > 0);
}

function show() {
  for (const name of Object.keys(FIELDS)) {
    inputs[name].input.value = values[name];
    accept(name);
  }
}

function toRow(name, field) {
  const id = `setting-${name}`;
  const input = element(field.rows ? "textarea" : "input", "", {
    id, name, autocomplete: "off",
    ...(field.rows ? { rows: field.rows } : { inputMode: "decimal" }),
    aria: { describedby: `${id}-help ${id}-error` },
    oninput: () => accept(name),
  });
  const error = element("p", "", { id: `${id}-error`, className: "fault", role: "alert" });
  inputs[name] = { input, error };
  return element("div", "", { className: field.rows ? "setting whole" : "setting" },
    element("label", field.label, { htmlFor: id }), input,
    element("p", field.help, { id: `${id}-help`, className: "help" }), error);
}

for (const name of Object.keys(FIELDS)) find("settings-fields").append(toRow(name, FIELDS[name]));
find("settings-reset").append(button("Reset to defaults", () => {
  values = defaults();
  show();
}));
find("settings-open").addEventListener("click", () => find("settings").showModal());
find("settings").addEventListener("close", show); // a value that was not accepted is gone

for (const [name, value] of Object.entries(readSetting("settings") ?? {})) {
  const field = FIELDS[name];
  const isRight = field && (field.rows ? typeof value === "string" : !fault(field, String(value)));
  if (isRight) values[name] = value;
}
show();
