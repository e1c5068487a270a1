// Runs in <head>, before the first paint: a theme the reader chose wins over the system's. The switch is here too.
"use strict";

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return document.documentElement.dataset.theme || (systemDark.matches ? "dark" : "light");
}

try {
  const chosen = localStorage.getItem("dash-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch (error) {
  // Storage is refused in some private windows; the system's theme is right then.
}

document.addEventListener("click", (event) => {
  if (!event.target.closest("[data-theme-switch]")) return;
  const next = theme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("dash-theme", next);
  } catch (error) {
    // The choice holds for this page only.
  }
  document.dispatchEvent(new Event("themechange"));
});
