// The table of recent placements.

import { byId, element } from "./dom.js";
import { age, count, duration } from "./format.js";
import { place } from "./workers.js";

const COLUMNS = [
  [(p) => p.state, ""],
  [(p) => age(p.age), "number"],
  [(p) => duration(p.ttft), "number"],
  [(p) => duration(p.itl), "number"],
  [(p) => duration(p.seconds), "number"],
  [(p) => p.decode, ""],
  [(p) => p.prefill || "there", ""],
  [(p) => count(p.prompt_tokens), "number"],
  [(p) => count(p.predicted_tokens), "number"],
  [(p) => count(p.cached_tokens), "number"],
  [(p) => count(p.output_tokens), "number"],
];

/** The table. `open` is called with a placement's id. */
export class Placements {
  constructor(open) {
    this.open = open;
    this.rows = new Map(); // by placement id
    this.placements = [];
    byId("placement-state").addEventListener("change", () => this._arrange());
  }

  show({ placements }) {
    this.placements = placements;
    const known = new Set(placements.map((one) => one.placement_id));
    for (const id of this.rows.keys()) if (!known.has(id)) this.rows.delete(id);
    for (const one of placements) this._fill(one);
    this._arrange();
  }

  _fill(one) {
    let row = this.rows.get(one.placement_id);
    if (!row) {
      const name = element("button", { type: "button", className: "link id", textContent: one.request_id || one.placement_id,
        title: one.request_id, onclick: () => this.open(one.placement_id) });
      row = element("tr", {}, element("th", { attributes: { scope: "row" } }, name),
        ...COLUMNS.map(([, className]) => element("td", { className })));
      this.rows.set(one.placement_id, row);
    }
    COLUMNS.forEach(([say], at) => {
      const text = say(one);
      if (row.children[at + 1].textContent !== text) row.children[at + 1].textContent = text;
    });
    row.dataset.state = one.state;
    row.title = one.tenant ? `tenant ${one.tenant}` : "";
  }

  _arrange() {
    const state = byId("placement-state").value;
    const shown = this.placements.filter((one) => !state || one.state === state);
    place(byId("placement-rows"), shown.map((one) => this.rows.get(one.placement_id)));
    byId("placements-none").hidden = shown.length > 0;
    byId("placements-none").textContent = this.placements.length
      ? `None of the last ${this.placements.length} requests is ${state}.`
      : "No request has been placed yet. Each one shows up here with where it runs and why.";
    byId("placements-scroll").hidden = shown.length === 0;
  }
}
