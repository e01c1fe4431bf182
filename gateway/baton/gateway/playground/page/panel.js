// The settings panel next to the chat, or over it on narrow screens.

import { byId } from "./dom.js";

const NARROW = matchMedia("(max-width: 60rem)");

/** Opens and closes the panel. While it covers the chat, the chat cannot have the focus. */
export class Panel {
  constructor() {
    this.isOpen = !NARROW.matches;
    byId("show-settings").addEventListener("click", () => (this.isOpen ? this.close() : this.open()));
    byId("hide-settings").addEventListener("click", () => this.close());
    byId("shade").addEventListener("click", () => this.close());
    NARROW.addEventListener("change", () => this._set(!NARROW.matches));
    this._set(this.isOpen);
  }

  get coversChat() {
    return this.isOpen && NARROW.matches;
  }

  open() {
    this._set(true);
    byId("hide-settings").focus();
  }

  close() {
    this._set(false);
    byId("show-settings").focus();
  }

  /** Shows a setting and focuses it. */
  reveal(control) {
    if (byId("settings").contains(control)) this._set(true);
    const section = control.closest("details");
    if (section) section.open = true;
    control.focus();
    control.scrollIntoView({ block: "center" });
  }

  _set(isOpen) {
    this.isOpen = isOpen;
    byId("settings").hidden = !isOpen;
    byId("show-settings").setAttribute("aria-expanded", String(isOpen));
    byId("shade").hidden = !this.coversChat;
    for (const node of [byId("chat"), byId("search"), document.querySelector(".bar")]) node.inert = this.coversChat;
  }
}
