// Runs before the first paint, so that the page never flashes in the wrong theme.
"use strict";
{
  const key = "baton.theme";
  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");

  const stored = () => {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // storage is disabled
    }
  };
  const store = (theme) => {
    try {
      theme ? localStorage.setItem(key, theme) : localStorage.removeItem(key);
    } catch {
      // The choice lasts as long as the page.
    }
  };
  const system = () => (systemDark.matches ? "dark" : "light");
  const shown = () => root.dataset.theme || system();
  const other = () => (shown() === "dark" ? "light" : "dark");

  const chosen = stored();
  if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => {
      document.getElementById("theme-name").textContent = `Switch to the ${other()} theme`;
      button.title = `Switch to the ${other()} theme`;
    };
    button.addEventListener("click", () => {
      const theme = other();
      // If the choice equals the system's theme, the page follows the system again.
      if (theme === system()) delete root.dataset.theme;
      else root.dataset.theme = theme;
      store(root.dataset.theme);
      name();
    });
    systemDark.addEventListener("change", name);
    name();
  });
}
