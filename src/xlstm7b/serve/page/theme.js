// The theme: that of the system, light or dark.

import { find } from "./dom.js";
import { readSetting, saveSetting } from "./store.js";

const THEMES = { system: "◐", light: "☀", dark: "☾" };

function use(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = THEMES[theme];
  find("theme").title = find("theme").ariaLabel = `Theme: ${theme}`;
}

find("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const current = names.indexOf(document.documentElement.dataset.theme);
  const next = names[(current + 1) % names.length];
  use(next);
  saveSetting("theme", next);
});

const stored = readSetting("theme");
use(stored in THEMES ? stored : "system");
