// The workers: a map of all, and a table to sort and filter.

import { byId, element } from "./dom.js";
import { bandwidth, count, outOf, percent, plural, rate, short } from "./format.js";

// A column's name, its sort key, its text, and whether it is a number.
const COLUMNS = [
  ["Worker", (w) => w.worker_id || w.address, (w) => w.worker_id || w.address, false],
  ["Role", (w) => w.role, (w) => w.role, false],
  ["State", (w) => STATES.indexOf(w.state), (w) => (w.problem ? `${w.state}: ${w.problem}` : w.state), false],
  ["Running", (w) => w.running, (w) => count(w.running), true],
  ["Queue", (w) => w.queue_depth, (w) => count(w.queue_depth), true],
  ["KV used", (w) => w.kv_usage ?? -1, (w) => percent(w.kv_usage), true],
  ["Hit rate", (w) => w.hit_rate ?? -1, (w) => percent(w.hit_rate), true],
  ["Prompts", (w) => w.prompt_tokens_per_second ?? -1, (w) => rate(w.prompt_tokens_per_second), true],
  ["Output", (w) => w.output_tokens_per_second ?? -1, (w) => rate(w.output_tokens_per_second), true],
  ["Tokens a step", (w) => w.tokens_per_step ?? -1, (w) => short(w.tokens_per_step), true],
  ["Adapters", (w) => w.num_adapters ?? -1, (w) => outOf(w.num_adapters, w.num_adapter_slots), true],
  ["KV in", (w) => w.received_bytes_per_second ?? -1, (w) => bandwidth(w.received_bytes_per_second), true],
  ["Preempted", (w) => w.preemptions, (w) => count(w.preemptions), true],
  ["Epoch", (w) => w.epoch, (w) => w.epoch, true],
];
const STATES = ["dead", "cordoned", "draining", "serving"];
const KV = 5;
const ADAPTERS = COLUMNS.findIndex(([name]) => name === "Adapters");
const FEWEST_MAPPED = 9;

/** The section. */
export class Workers {
  constructor() {
    this.sorted = 0;
    this.descending = false;
    this.rows = new Map(); // by address
    this.cells = new Map();
    this.workers = [];
    this.heads = COLUMNS.map(([name, , , isNumber], at) => {
      const button = element("button", { type: "button", className: "sort", textContent: name, onclick: () => this._sortBy(at) });
      return element("th", { className: isNumber ? "number" : "", attributes: { scope: "col" } }, button);
    });
    byId("worker-head").append(...this.heads);
    byId("worker-filter").addEventListener("input", () => this._arrange());
    byId("worker-role").addEventListener("change", () => this._arrange());
    this._mark();
  }

  show({ workers, routers }) {
    this.workers = workers;
    const known = new Set(workers.map((one) => one.address));
    for (const nodes of [this.rows, this.cells]) {
      for (const [address, node] of nodes) {
        if (known.has(address)) continue;
        node.remove();
        nodes.delete(address);
      }
    }
    for (const worker of workers) this._fill(worker);
    byId("map").hidden = byId("map-note").hidden = workers.length < FEWEST_MAPPED;
    byId("workers-none").hidden = workers.length > 0;
    byId("workers-none").textContent = routers.some((one) => !one.problem)
      ? "The routers know no worker yet."
      : "No router has answered yet.";
    byId("workers-scroll").hidden = workers.length === 0;
    this._arrange();
  }

  _fill(worker) {
    let row = this.rows.get(worker.address);
    if (!row) {
      const cells = COLUMNS.map(([, , , isNumber], at) =>
        element(at ? "td" : "th", { className: isNumber ? "number" : "", attributes: at ? {} : { scope: "row" } }));
      row = element("tr", {}, ...cells);
      cells[KV].classList.add("meter");
      this.rows.set(worker.address, row);
      this.cells.set(worker.address, element("span", { className: "map-cell" }));
    }
    COLUMNS.forEach(([, , say], at) => setText(row.children[at], say(worker)));
    row.dataset.state = worker.state;
    row.title = worker.problem ? `${worker.address}: ${worker.problem}` : worker.address;
    row.children[ADAPTERS].title = adapterWords(worker);
    row.children[KV].style.setProperty("--part", worker.kv_usage ?? 0);
    const cell = this.cells.get(worker.address);
    cell.dataset.state = worker.state;
    cell.style.setProperty("--part", worker.kv_usage ?? 0);
    cell.title = `${worker.worker_id || worker.address}: ${worker.state}, KV used ${percent(worker.kv_usage)}`;
  }

  /** Sorts and filters the rows, and moves only those whose place has changed. */
  _arrange() {
    const words = byId("worker-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const role = byId("worker-role").value;
    const shown = this.workers.filter((one) => {
      const text = `${one.worker_id} ${one.address} ${one.state} ${one.role} ${one.model} ${one.problem}`.toLowerCase();
      return (!role || one.role === role) && words.every((word) => text.includes(word));
    });
    const key = COLUMNS[this.sorted][1];
    const sign = this.descending ? -1 : 1;
    shown.sort((a, b) => sign * compare(key(a), key(b)) || compare(a.address, b.address));
    place(byId("worker-rows"), shown.map((one) => this.rows.get(one.address)));
    place(byId("map"), this.workers.map((one) => this.cells.get(one.address)));
    byId("workers-count").textContent = shown.length === this.workers.length
      ? plural(shown.length, "worker")
      : `${count(shown.length)} of ${plural(this.workers.length, "worker")}`;
  }

  _sortBy(at) {
    // The first click on a numeric column sorts in descending order.
    this.descending = this.sorted === at ? !this.descending : COLUMNS[at][3];
    this.sorted = at;
    this._mark();
    this._arrange();
  }

  _mark() {
    this.heads.forEach((head, at) => {
      if (at !== this.sorted) head.removeAttribute("aria-sort");
      else head.setAttribute("aria-sort", this.descending ? "descending" : "ascending");
    });
  }
}

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
}

/** Names the adapters on the worker's device. */
function adapterWords({ num_adapters, adapters, num_served_adapters }) {
  if (num_adapters === null) return "";
  const more = num_adapters > adapters.length ? " and more" : "";
  return `On the device: ${adapters.join(", ") || "none"}${more}; ${count(num_served_adapters)} served`;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Replaces the children by these nodes, in this order. */
export function place(parent, nodes) {
  nodes.forEach((node, at) => {
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
  });
  while (parent.children.length > nodes.length) parent.lastElementChild.remove();
}
