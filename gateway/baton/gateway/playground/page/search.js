// The search: documents that are pasted, a query, and the documents in the order of their scores.

import { rerank } from "./api.js";
import { byId, element } from "./dom.js";
import { EXAMPLE_DOCUMENTS, EXAMPLE_QUERY } from "./examples.js";
import { count, tokens } from "./figures.js";
import { keep, recall } from "./store.js";

const PLACE = /^documents\.(\d+)/;

/** Returns the documents of a text: paragraphs if there are empty lines, otherwise lines. */
export function documentsIn(text) {
  const parts = /\n[^\S\n]*\n/.test(text.trim()) ? text.split(/\n[^\S\n]*\n/) : text.split("\n");
  return parts.map((part) => part.trim()).filter(Boolean);
}

/** Runs one search at a time. `settings` has the model and the key, `say` announces a text to screen readers. */
export class Search {
  constructor(settings, say) {
    this.settings = settings;
    this.say = say;
    this.running = null; // the AbortController of the running search
    this.documents = byId("documents");
    this.query = byId("query");
    this.documents.value = recall("documents", "");
    this.query.value = recall("query", "");
    byId("search-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    byId("example-documents").addEventListener("click", () => this._fill(EXAMPLE_DOCUMENTS.join("\n"), EXAMPLE_QUERY));
    byId("search-stop").addEventListener("click", () => this.stop());
    for (const control of [this.documents, this.query]) control.addEventListener("input", () => this._changed());
    this._changed();
  }

  /** Returns the body of the request. */
  get body() {
    const { model } = this.settings();
    const documents = documentsIn(this.documents.value);
    return { ...(model ? { model } : {}), query: this.query.value.trim(), documents, return_documents: false };
  }

  stop() {
    this.running?.abort();
  }

  /** Searches. Never throws. */
  async run() {
    if (this.running || byId("search-send").disabled) return;
    const { body } = this;
    const abort = (this.running = new AbortController());
    this._setBusy(true);
    this._clear();
    const began = performance.now();
    try {
      const answer = await rerank(body, this.settings().apiKey, abort.signal);
      this._show(answer, body.documents, performance.now() - began);
    } catch (error) {
      if (abort.signal.aborted) this.say("Stopped.");
      else this._fail(error);
    }
    this.running = null;
    this._setBusy(false);
  }

  _show({ results, usage }, documents, milliseconds) {
    byId("results").replaceChildren(...results.map((result) => rowOf(result, documents[result.index])));
    const facts = [`${count(results.length)} documents`, tokens(usage.prompt_tokens), `${Math.round(milliseconds)} ms`];
    byId("search-figures").textContent = facts.join(", ");
    this.say(`${facts[0]} are ranked. The best: ${documents[results[0].index]}`);
  }

  _fail({ message, status = 0, param = null }) {
    const place = PLACE.exec(param ?? "");
    const where = place ? `Document ${Number(place[1]) + 1}: ` : "";
    byId("search-failure").textContent = `${status ? `Refused (${status}). ` : ""}${where}${message}`;
    byId("search-failure").hidden = false;
  }

  _clear() {
    byId("search-failure").hidden = true;
    byId("results").replaceChildren();
    byId("search-figures").textContent = "";
  }

  _fill(documents, query) {
    this.documents.value = documents;
    this.query.value = query;
    this._changed();
    this.query.focus();
  }

  _changed() {
    keep("documents", this.documents.value);
    keep("query", this.query.value);
    const found = documentsIn(this.documents.value);
    byId("num-documents").textContent = found.length ? count(found.length) : "";
    byId("search-send").disabled = !found.length || !this.query.value.trim();
  }

  _setBusy(isBusy) {
    const hadFocus = [byId("search-send"), byId("search-stop")].includes(document.activeElement);
    byId("search-send").hidden = isBusy;
    byId("search-stop").hidden = !isBusy;
    byId("results").setAttribute("aria-busy", String(isBusy));
    if (hadFocus) this.query.focus();
  }
}

function rowOf({ index, relevance_score: score }, text) {
  const shown = score.toFixed(3);
  const attributes = { "aria-label": `Score ${shown}` };
  return element(
    "li",
    {},
    element("p", { className: "rank" },
      element("meter", { min: 0, max: 1, value: score, attributes }),
      element("span", { className: "score", textContent: shown }),
      element("span", { className: "quiet", textContent: `Document ${index + 1}` })),
    element("p", { className: "found", textContent: text }),
  );
}
