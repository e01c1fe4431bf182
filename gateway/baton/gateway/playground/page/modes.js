// The switch between the chat and the search.

import { byId } from "./dom.js";
import { keep, recall } from "./store.js";

// The control that the skip link leads to, and the link's text.
const MODES = { chat: ["prompt", "Skip to the message box"], search: ["query", "Skip to the query"] };

/** Shows one of the modes. */
export class Modes {
  constructor() {
    this.isChosen = recall("mode", null) !== null; // by the user
    for (const name of Object.keys(MODES)) {
      byId(`mode-${name}`).addEventListener("click", () => this.choose(name));
    }
    this._show(recall("mode", "chat"));
  }

  /** Shows a mode, also after a reload. */
  choose(name) {
    keep("mode", name);
    this.isChosen = true;
    this._show(name);
    byId(MODES[name][0]).focus();
  }

  /** Shows the mode that a model is for, unless the user has chosen one. */
  suit(tasks) {
    if (this.isChosen || !tasks.length) return;
    this._show(tasks.includes("generate") ? "chat" : "search");
  }

  _show(name) {
    this.name = name in MODES ? name : "chat";
    for (const one of Object.keys(MODES)) {
      byId(one).hidden = one !== this.name;
      if (one === this.name) byId(`mode-${one}`).setAttribute("aria-current", "page");
      else byId(`mode-${one}`).removeAttribute("aria-current");
    }
    document.body.dataset.mode = this.name;
    const [control, text] = MODES[this.name];
    const skip = document.querySelector(".skip");
    skip.href = `#${control}`;
    skip.textContent = text;
  }
}
