// The settings form: reads and validates its values, and stores them for the tab.

import { byId, element } from "./dom.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS } from "./examples.js";
import { parseJson } from "./json_text.js";
import { clearProblem, clearProblems, showProblem } from "./problems.js";
import { forget, keep, recall } from "./store.js";

const PARSERS = { schema: schemaOf, tools: toolsOf }; // by the control's id
const ESCAPES = { n: "\n", t: "\t", "\\": "\\" };

/** The settings form. */
export class Settings {
  constructor() {
    this.form = byId("settings-form");
    this._restore();
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => this._changed(event.target));
    this.form.addEventListener("change", (event) => this._check(event.target));
    byId("reset").addEventListener("click", () => this.reset());
    for (const button of this.form.querySelectorAll("[data-example]")) {
      button.addEventListener("click", () => this._insertExample(button.dataset.example));
    }
    this._follow();
  }

  get apiKey() {
    return byId("api_key").value.trim();
  }

  get system() {
    return byId("system").value.trim();
  }

  /** Returns the values of a request, or null if a control is invalid, which is then focused with its problem. */
  read() {
    clearProblems();
    const wrong = [];
    const attempt = (control, parse) => {
      try {
        return parse(control);
      } catch (error) {
        showProblem(control, error.message);
        wrong.push(control);
        return undefined;
      }
    };
    const values = this._values(attempt);
    wrong[0]?.focus();
    return wrong.length ? null : values;
  }

  /** Resets all settings except the key. */
  reset() {
    const key = byId("api_key").value;
    this.form.reset();
    byId("api_key").value = key;
    clearProblems();
    forget("settings");
    this._follow();
  }

  _values(attempt) {
    const sampling = {};
    for (const input of this.form.querySelectorAll("input[inputmode]")) {
      const number = attempt(input, numberOf);
      if (number !== undefined) sampling[input.name] = number;
    }
    const stop = stopStrings(byId("stop_strings").value);
    if (stop.length) sampling.stop = stop;
    const format = byId("response_format").value;
    return {
      sampling,
      format,
      schema: format === "json_schema" ? attempt(byId("schema"), schemaOf) : null,
      tools: attempt(byId("tools"), toolsOf) ?? [],
      toolChoice: byId("tool_choice").value,
      parallelCalls: byId("parallel_tool_calls").checked,
    };
  }

  _changed(control) {
    clearProblem(control);
    this._keep();
    this._follow();
  }

  _check(control) {
    const parse = PARSERS[control.id] ?? (control.inputMode ? numberOf : null);
    if (!parse || !control.value.trim()) return;
    try {
      parse(control);
    } catch (error) {
      showProblem(control, error.message);
    }
  }

  /** Updates controls that depend on others. */
  _follow() {
    byId("schema-field").hidden = byId("response_format").value !== "json_schema";
    this._offerNames();
  }

  _offerNames() {
    const choice = byId("tool_choice");
    let names = [];
    try {
      names = toolsOf(byId("tools")).map((tool) => tool.function.name);
    } catch {
      return; // incomplete input: keep the previous options
    }
    const chosen = choice.value;
    for (const option of [...choice.options].slice(3)) option.remove();
    const optionOf = (name) => element("option", { value: `function:${name}`, textContent: `Call ${name}` });
    choice.append(...names.map(optionOf));
    if ([...choice.options].some((option) => option.value === chosen)) choice.value = chosen;
  }

  _insertExample(id) {
    const area = byId(id);
    area.value = JSON.stringify(id === "schema" ? EXAMPLE_SCHEMA : EXAMPLE_TOOLS, null, 2);
    this._changed(area);
    area.focus();
  }

  _keep() {
    const values = {};
    for (const control of this.form.elements) {
      if (!control.name || control.name === "api_key") continue;
      values[control.name] = control.type === "checkbox" ? control.checked : control.value;
    }
    keep("settings", values);
    if (this.apiKey) keep("api_key", this.apiKey);
    else forget("api_key");
  }

  _restore() {
    const values = recall("settings", {});
    // Restore the tools before the choice among them.
    for (const control of this.form.elements) {
      if (!(control.name in values)) continue;
      if (control.type === "checkbox") control.checked = values[control.name];
      else control.value = values[control.name];
      if (control.name === "tools") this._offerNames();
    }
    byId("api_key").value = recall("api_key", "");
    if (byId("tools").value) byId("tools-section").open = true;
  }
}

function numberOf(input) {
  const text = input.value.trim();
  if (!text) return undefined;
  const { min, above, max } = input.dataset;
  const whole = "whole" in input.dataset;
  const value = Number(text.replace(",", "."));
  const fits = Number.isFinite(value) && !(value < min) && !(value <= above) && !(value > max);
  if (fits && (!whole || Number.isSafeInteger(value))) return value;
  const low = above === undefined ? `from ${min}` : `above ${above}`;
  throw new Error(`“${text}” is not allowed: give a ${whole ? "whole " : ""}number ${low} to ${max}.`);
}

function stopStrings(text) {
  const lines = text.split("\n").filter(Boolean);
  return lines.map((line) => line.replace(/\\([nt\\])/g, (_, char) => ESCAPES[char]));
}

function schemaOf(area) {
  if (!area.value.trim()) throw new Error("Give a JSON schema, or choose another format.");
  const schema = parseJson(area.value);
  if (!isObject(schema) && typeof schema !== "boolean") throw new Error("A JSON schema is an object.");
  return schema;
}

function toolsOf(area) {
  if (!area.value.trim()) return [];
  const given = parseJson(area.value);
  const list = Array.isArray(given) ? given : [given];
  return list.map((one, index) => {
    const tool = isObject(one) && isObject(one.function) ? one : { type: "function", function: one };
    if (!isObject(tool.function) || typeof tool.function.name !== "string") {
      throw new Error(`Function ${index + 1} of the list has no "name".`);
    }
    return tool;
  });
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
