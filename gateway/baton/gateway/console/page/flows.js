// KV transfers from prefill workers to decode workers.

import { byId, element } from "./dom.js";
import { bandwidth, plural, rate } from "./format.js";
import { svg } from "./svg.js";

const MOST = 24; // more lines cannot be distinguished
const MOST_NARROW = 12;
const ROW = 26;
const ROW_NARROW = 40; // with the value below the name
const NARROW = 560;
const LABEL = 184; // pixels of a name and its value
const LABEL_NARROW = 112;
const MOST_LETTERS = 14; // letters of a name
const WIDEST = 12;

/** The diagram, and a table with the same values. */
export class Flows {
  constructor() {
    this.chart = byId("flows-chart");
    this.flows = [];
    this.more = ""; // note about flows that are not drawn
    this.drawn = new Set(); // the lines drawn last time
    new ResizeObserver(() => this._draw()).observe(this.chart);
  }

  show({ flows, fleet, workers, window }) {
    this.flows = flows;
    const isEmpty = flows.length === 0;
    byId("flows-total").textContent = isEmpty ? "" : `${bandwidth(fleet.transfer_bytes_per_second)} in all`;
    byId("flows-none").hidden = !isEmpty;
    byId("flows-none").textContent = emptyWords(workers, window);
    byId("flows-details").hidden = isEmpty;
    const all = fleet.num_flows > flows.length ? `the largest ${flows.length}` : "all";
    this.more = `of ${plural(fleet.num_flows, "flow")}; the table has ${all}.`;
    byId("flows-rows").replaceChildren(...flows.map(rowOf));
    this._draw();
  }

  /** Returns the largest flows. A flow drawn before stays while it is among twice as many, to avoid flicker. */
  _chosen(most) {
    const candidates = this.flows.slice(0, 2 * most);
    const stay = candidates.filter((flow) => this.drawn.has(keyOf(flow))).slice(0, most);
    const chosen = new Set([...stay, ...candidates.filter((flow) => !this.drawn.has(keyOf(flow)))].slice(0, most));
    this.drawn = new Set([...chosen].map(keyOf));
    return candidates.filter((flow) => chosen.has(flow));
  }

  _draw() {
    const width = this.chart.clientWidth;
    const shown = this._chosen(width < NARROW ? MOST_NARROW : MOST);
    this.chart.hidden = shown.length === 0;
    byId("flows-more").hidden = shown.length === this.flows.length;
    byId("flows-more").textContent = `${shown.length} ${this.more}`;
    if (!shown.length || !width) return;
    const [left, right] = [totalsBy(shown, "sender"), totalsBy(shown, "receiver")];
    const isNarrow = width < NARROW;
    const height = Math.max(left.length, right.length) * (isNarrow ? ROW_NARROW : ROW);
    const label = isNarrow ? LABEL_NARROW : LABEL;
    const [from, to] = [placesOf(left, height), placesOf(right, height)];
    const top = Math.max(...shown.map((flow) => flow.bytes_per_second));
    const lines = shown.map((flow) => lineOf(flow, from.get(flow.sender), to.get(flow.receiver), label, width, top));
    const names = [
      ...left.map(([name, total]) => nameOf(name, total, label - 8, from.get(name), "end", isNarrow)),
      ...right.map(([name, total]) => nameOf(name, total, width - label + 8, to.get(name), "start", isNarrow)),
    ];
    const words = shown.slice(0, 5).map((flow) => `${flow.sender} to ${flow.receiver} ${bandwidth(flow.bytes_per_second)}`);
    const attributes = { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words.join(", ") };
    this.chart.replaceChildren(svg("svg", attributes, ...lines, ...names));
  }
}

function emptyWords(workers, window) {
  if (!workers.some((one) => one.role === "prefill")) return "No KV moves: no worker prefills for others.";
  return window ? "No KV has moved in the last seconds." : "Not known yet.";
}

function keyOf(flow) {
  return `${flow.sender} ${flow.receiver}`;
}

function totalsBy(flows, key) {
  const totals = new Map();
  for (const flow of flows) totals.set(flow[key], (totals.get(flow[key]) ?? 0) + flow.bytes_per_second);
  // Sorted by name, so that nothing jumps every second.
  return [...totals].sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
}

function placesOf(totals, height) {
  const step = height / totals.length;
  return new Map(totals.map(([name], at) => [name, (at + 0.5) * step]));
}

function lineOf(flow, y1, y2, label, width, top) {
  const [x1, x2] = [label, width - label];
  const middle = (x1 + x2) / 2;
  const thick = Math.max(1, (flow.bytes_per_second / top) * WIDEST);
  const title = svg("title", {}, `${flow.sender} → ${flow.receiver}: ${bandwidth(flow.bytes_per_second)}`);
  const d = `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`;
  return svg("path", { class: "flow", d, "stroke-width": thick.toFixed(1) }, title);
}

function nameOf(name, total, x, y, anchor, isNarrow) {
  const text = name.length > MOST_LETTERS ? `…${name.slice(1 - MOST_LETTERS)}` : name;
  const below = isNarrow ? { x, dy: "1.2em" } : {};
  const figure = svg("tspan", { class: "flow-figure", ...below }, `${isNarrow ? "" : " "}${bandwidth(total)}`);
  const attributes = { class: "flow-name", x, y: isNarrow ? y - 7 : y, "text-anchor": anchor, "dominant-baseline": "central" };
  return svg("text", attributes, text, figure, svg("title", {}, name));
}

function rowOf(flow) {
  const cell = (textContent, className = "") => element("td", { textContent, className });
  return element("tr", {}, cell(flow.sender), cell(flow.receiver),
    cell(bandwidth(flow.bytes_per_second), "number"), cell(rate(flow.transfers_per_second), "number"));
}
