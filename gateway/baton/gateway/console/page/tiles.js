// Tiles with the values of the whole fleet.

import { element } from "./dom.js";
import { bandwidth, count, duration, percent, rate } from "./format.js";
import { Sparkline } from "./svg.js";

const HISTORY = 60; // snapshots

// A tile's name, its formatted value, the note below it, and the number for its sparkline.
const TILES = [
  ["Workers", (f) => `${count(f.num_alive)}`, (f) => deadOf(f), null],
  ["Running", (f) => count(f.running), (f) => `${count(f.queue_depth)} queued`, (f) => f.running],
  ["KV used", (f) => percent(f.kv_usage), () => "of all live workers", (f) => f.kv_usage],
  ["Hit rate", (f) => percent(f.hit_rate), () => "of prompt tokens", (f) => f.hit_rate],
  ["Output", (f) => rate(f.output_tokens_per_second), () => "tokens", (f) => f.output_tokens_per_second],
  ["Prompts", (f) => rate(f.prompt_tokens_per_second), () => "tokens", (f) => f.prompt_tokens_per_second],
  ["Requests", (f) => rate(f.placements_per_second), (f) => troubleOf(f), (f) => f.placements_per_second],
  ["KV moved", (f) => bandwidth(f.transfer_bytes_per_second), () => "between workers", (f) => f.transfer_bytes_per_second],
];
const PERCENTILES = [
  ["TTFT", "ttft", "From the placement request to the first token, for recently ended requests"],
  ["ITL", "itl", "Mean time between two tokens of a request, for recently ended requests"],
];

/** The tiles, created once and updated every second. */
export class Tiles {
  constructor(list) {
    this.tiles = TILES.map(([name, value, below, line]) => {
      const tile = { value, below, line, spark: line ? new Sparkline(HISTORY) : null };
      tile.big = element("dd", { className: "tile-value" });
      tile.small = element("dd", { className: "tile-below" });
      list.append(element("div", { className: "tile" }, element("dt", { textContent: name }), tile.big, tile.small,
        tile.spark && element("dd", { className: "tile-line" }, tile.spark.node)));
      return tile;
    });
    this.percentiles = PERCENTILES.map(([name, key, title]) => {
      const cells = ["p50", "p90", "p99"].map((part) => [part, element("span", { className: "part-value" })]);
      const parts = cells.map(([part, node]) =>
        element("span", { className: "part" }, element("span", { className: "part-name", textContent: part }), node));
      const below = element("dd", { className: "tile-below" });
      list.append(element("div", { className: "tile wide" }, element("dt", { textContent: name, title }),
        element("dd", { className: "parts" }, ...parts), below));
      return { key, cells, below };
    });
  }

  show({ fleet, window }) {
    for (const tile of this.tiles) {
      tile.big.textContent = tile.value(fleet);
      tile.small.textContent = tile.below(fleet);
      if (tile.spark) tile.spark.add(window ? tile.line(fleet) : null);
    }
    for (const { key, cells, below } of this.percentiles) {
      for (const [part, node] of cells) node.textContent = duration(fleet[key]?.[part] ?? null);
      below.textContent = fleet[key]
        ? `of the last ${Math.round(fleet.percentile_seconds)} s`
        : window ? "no request has ended recently" : "not known yet";
    }
  }
}

function deadOf(fleet) {
  const dead = fleet.num_workers - fleet.num_alive;
  return dead ? `${count(dead)} dead` : "all alive";
}

function troubleOf(fleet) {
  if (fleet.refusals_per_second === null) return "not known yet";
  const parts = [];
  if (fleet.refusals_per_second) parts.push(`${rate(fleet.refusals_per_second)} refused`);
  if (fleet.failures_per_second) parts.push(`${rate(fleet.failures_per_second)} failed`);
  return parts.join(", ") || "none refused";
}
