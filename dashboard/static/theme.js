// Runs in <head>, before the first paint: a theme the reader chose wins over the system's.
(function () {
  try {
    const chosen = localStorage.getItem("dash-theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch (error) {
    // Storage is refused in some private windows; the system's theme is right then.
  }
})();
