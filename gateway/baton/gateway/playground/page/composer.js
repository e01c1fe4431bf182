// The form that sends messages and stops answers.

import { byId, fitHeight } from "./dom.js";
import { keep, recall } from "./store.js";

/** Calls `onSend(text)` and `onStop()`. */
export class Composer {
  constructor(onSend, onStop) {
    this.area = byId("prompt");
    this.isBusy = false;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.area.value.trim();
      if (text && !this.isBusy) onSend(text);
    });
    byId("stop").addEventListener("click", onStop);
    this.area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    this.area.addEventListener("input", () => this._changed());
    this.area.value = recall("draft", "");
    this._changed();
  }

  set text(text) {
    this.area.value = text;
    this._changed();
  }

  /** While an answer streams there is a Stop button, and Enter sends nothing. */
  setBusy(isBusy) {
    this.isBusy = isBusy;
    const hadFocus = [byId("send"), byId("stop")].includes(document.activeElement);
    byId("send").hidden = isBusy;
    byId("stop").hidden = !isBusy;
    if (hadFocus) this.focus();
  }

  focus() {
    this.area.focus();
  }

  _changed() {
    fitHeight(this.area);
    byId("send").disabled = !this.area.value.trim();
    keep("draft", this.area.value);
  }
}
