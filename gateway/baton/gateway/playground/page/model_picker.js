// The selection of a served model.

import { listModels } from "./api.js";
import { byId, element } from "./dom.js";
import { count } from "./figures.js";
import { controlOf, showProblem } from "./problems.js";
import { keep, recall } from "./store.js";

/** Fills the selection, and explains in the notice why it is empty. */
export class ModelPicker {
  constructor(apiKey, onPick) {
    this.apiKey = apiKey;
    this.onPick = onPick; // called with the tasks of the model
    this.tasks = new Map(); // by model
    this.select = byId("model");
    this.select.addEventListener("change", () => {
      keep("model", this.select.value);
      this._name();
    });
    byId("notice-retry").addEventListener("click", () => this.load());
  }

  get model() {
    return this.select.value;
  }

  /** Requests the models. Never throws. */
  async load() {
    try {
      const models = await listModels(this.apiKey());
      this._fill(models);
      this._notice(models.length ? null : "The gateway serves no model yet. Its workers may still be starting.");
    } catch (error) {
      this._notice(error.message);
      const control = controlOf(error.param, error.status);
      if (control) showProblem(control, error.message);
    }
  }

  _fill(models) {
    const chosen = recall("model", "");
    this.select.replaceChildren(...models.map(optionOf));
    this.tasks = new Map(models.map((model) => [model.id, model.tasks ?? []]));
    this.select.disabled = models.length === 0;
    if (models.some((model) => model.id === chosen)) this.select.value = chosen;
    this._name();
  }

  _name() {
    byId("welcome-model").textContent = this.model || "the model";
    this.onPick(this.tasks.get(this.model) ?? []);
  }

  _notice(text) {
    byId("notice").hidden = text === null;
    byId("notice-text").textContent = text ?? "";
    if (text === null || this.model) return;
    this.select.replaceChildren(element("option", { value: "", textContent: "No model" }));
  }
}

function optionOf(model) {
  const title = model.max_model_len ? `${count(model.max_model_len)} tokens of context` : "";
  return element("option", { value: model.id, textContent: model.id, title });
}
