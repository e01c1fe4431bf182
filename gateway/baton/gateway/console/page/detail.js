// Shows one request: its times, and the explanation of its placement.

import { byId, element } from "./dom.js";
import { bytes, count, duration, percent, plural, rate, bandwidth } from "./format.js";

const MAX_CANDIDATES = 12;
const COSTS = ["queue", "prefill", "transfer", "restore", "adapter", "decode", "memory", "later"];

/** The dialog. */
export class Detail {
  constructor() {
    this.dialog = byId("detail");
    byId("detail-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // a click outside
    });
  }

  show(entry) {
    byId("detail-title").textContent = `Request ${entry.request_id || entry.placement_id}`;
    const parts = [factsOf(entry), timelineOf(entry.result), candidatesOf(entry), evidenceOf(entry)];
    byId("detail-body").replaceChildren(...parts.flat());
    byId("detail-body").scrollTop = 0;
    if (!this.dialog.open) this.dialog.showModal();
  }
}

function factsOf(entry) {
  const { result } = entry;
  const pairs = [
    ["Decodes on", entry.decode],
    ["Prefilled by", entry.prefill || "the same worker"],
    ["Prompt", `${plural(entry.prompt_tokens, "token")}, ${count(Math.max(entry.decode_cached_tokens, entry.prefill_cached_tokens))} expected in caches`
      + (result && !result.worker_failed ? `, ${count(result.cached_tokens)} found` : "")],
    ["Output", result ? plural(result.output_tokens, "token") : `about ${plural(Math.round(entry.expected_output_tokens), "token")} expected`],
    ["Outcome", !result ? "still running" : result.worker_failed ? "its worker failed; it went on elsewhere, or ended" : "finished"],
    ["Model", entry.adapter ? `${entry.model}, adapter ${entry.adapter}` : entry.model],
    ["Tenant", entry.tenant || "the default"],
  ];
  if (entry.priority) pairs.push(["Priority", String(entry.priority)]);
  if (entry.excluded.length) pairs.push(["Not on", entry.excluded.join(", ")]);
  const nodes = pairs.map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
  return [element("dl", { className: "facts" }, ...nodes)];
}

/** Bars on one scale, starting at the placement request. */
function timelineOf(result) {
  const title = element("h3", { textContent: "Time" });
  if (!result?.times) {
    const text = result ? "No times were reported for this placement." : "The times are reported when the request has ended.";
    return [title, element("p", { className: "empty", textContent: text })];
  }
  const { times } = result;
  const scheduled = times.place + times.queue;
  const first = times.first_token ?? scheduled + times.prefill;
  const bars = [
    ["Place", "place", 0, times.place, ""],
    ["Queue", "queue", times.place, times.queue, times.preemptions ? plural(times.preemptions, "preemption") : ""],
    ["Prefill", "prefill", scheduled, Math.max(0, first - scheduled), "until the first token"],
    ...(times.transfer ? [["Transfer", "transfer", scheduled, times.transfer, transferNote(times)]] : []),
    ["Decode", "decode", first, times.decode, times.itl ? `${duration(times.itl)} a token` : ""],
  ];
  const end = Math.max(first + times.decode, ...bars.map(([, , start, seconds]) => start + seconds), 1e-6);
  const rows = bars.flatMap(([name, kind, start, seconds, note]) => {
    const bar = element("span", { className: `bar-fill ${kind}` });
    bar.style.left = `${(start / end) * 100}%`;
    bar.style.width = `${(seconds / end) * 100}%`;
    return [
      element("dt", { textContent: name }),
      element("dd", { className: "lane" }, bar),
      element("dd", { className: "lane-words" }, element("strong", { textContent: duration(seconds) }),
        element("span", { className: "quiet", textContent: note ? ` ${note}` : "" })),
    ];
  });
  const scale = element("p", { className: "note", textContent: `First token after ${duration(first)}, the end after ${duration(first + times.decode)}.` });
  return [title, element("dl", { className: "timeline" }, ...rows), scale];
}

function transferNote(times) {
  const speed = times.transfer ? `, ${bandwidth(times.transfer_bytes / times.transfer)}` : "";
  const waited = times.transfer_exposed ? `; the first token waited ${duration(times.transfer_exposed)}` : "; all beside the prefill";
  return `${bytes(times.transfer_bytes)}${speed}${waited}`;
}

function candidatesOf(entry) {
  const title = element("h3", { textContent: "Candidates" });
  const note = element("p", { className: "note", textContent:
    "The candidate placements with the seconds of delay that each would add, by cause. The first was chosen." });
  const shown = entry.ways.slice(0, MAX_CANDIDATES);
  const top = Math.max(...shown.map((way) => way.total), 1e-9);
  const used = COSTS.filter((kind) => shown.some((way) => way.costs[kind]));
  const legend = element("p", { className: "legend" },
    ...used.map((kind) => element("span", {}, element("span", { className: `swatch cost-${kind}` }), kind)));
  const items = shown.map((way, at) => {
    const bar = element("span", { className: "stack" });
    for (const kind of used) {
      if (!(way.costs[kind] > 0)) continue;
      const piece = element("span", { className: `cost-${kind}`, title: `${kind} ${duration(way.costs[kind])}` });
      piece.style.width = `${(way.costs[kind] / top) * 100}%`;
      bar.append(piece);
    }
    const where = way.prefill ? `${way.prefill} → ${way.decode}` : way.decode;
    const spoken = used.map((kind) => (way.costs[kind] ? `${kind} ${duration(way.costs[kind])}` : "")).filter(Boolean).join(", ");
    return element("li", { className: at ? "" : "taken" }, element("span", { className: "way", textContent: where }), bar,
      element("strong", { textContent: duration(way.total), title: spoken }), element("span", { className: "unseen", textContent: spoken }));
  });
  const more = entry.ways.length - shown.length;
  const rest = more > 0 ? [element("p", { className: "note", textContent: `And ${plural(more, "slower candidate")}.` })] : [];
  return [title, note, legend, element("ol", { className: "ways" }, ...items), ...rest];
}

function evidenceOf(entry) {
  const head = ["Worker", "Cached", "Requests", "Waiting", "Backlog", "State's age", "Prefill", "Transfer", "Refused because"];
  const numbers = new Set([1, 2, 3, 4, 5, 6, 7]);
  const rows = entry.evidence.map((one) => {
    const refused = Boolean(one.refusal);
    const figure = (text) => (refused ? "" : text);
    const cached = one.host_cached_tokens ? `${count(one.cached_tokens)} + ${count(one.host_cached_tokens)} in host memory` : count(one.cached_tokens);
    const cells = [one.worker_id, figure(`${cached}${entry.prompt_tokens ? ` (${percent(one.cached_tokens / entry.prompt_tokens)})` : ""}`),
      figure(count(one.num_requests)), figure(count(one.num_waiting)), figure(duration(one.backlog)), figure(duration(one.state_age)),
      figure(`${rate(one.prefill_tokens_per_second)}${one.is_measured ? "" : " (a guess)"}`),
      figure(one.transfer_bytes_per_second ? bandwidth(one.transfer_bytes_per_second) : "–"), one.refusal];
    return element("tr", {}, ...cells.map((text, at) =>
      element(at ? "td" : "th", { textContent: text, className: numbers.has(at) ? "number" : "", attributes: at ? {} : { scope: "row" } })));
  });
  const table = element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text, at) =>
      element("th", { textContent: text, className: numbers.has(at) ? "number" : "", attributes: { scope: "col" } })))),
    element("tbody", {}, ...rows));
  const region = { tabindex: "0", role: "region", "aria-label": "Evidence for each worker" };
  return [element("h3", { textContent: "Evidence" }), element("div", { className: "scroll", attributes: region }, table)];
}
