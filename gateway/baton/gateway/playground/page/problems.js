// Shows problems at their settings.

import { byId, element } from "./dom.js";

// Fields of the API whose control has another id; a field of a field belongs to the nearest of these.
const CONTROLS = new Map([
  ["model", "model"],
  ["stop", "stop_strings"],
  ["response_format", "schema"],
  ["response_format.type", "response_format"],
  ["structured_outputs", "schema"],
  ["tools", "tools"],
  ["tool_choice", "tool_choice"],
  ["parallel_tool_calls", "parallel_tool_calls"],
  ["max_completion_tokens", "max_tokens"],
  ["authorization", "api_key"],
]);

/** Returns the control of a refused request's field, or null. */
export function controlOf(param, status) {
  if (status === 401 || status === 403) return byId("api_key");
  if (!param) return null;
  for (let name = param; name; name = name.slice(0, Math.max(0, name.search(/[.[][^.[]*$/)))) {
    const control = byId(CONTROLS.get(name) ?? "") ?? (isSetting(name) ? byId(name) : null);
    if (control) return control;
  }
  return null;
}

/** Marks a control as invalid and shows the reason next to it. */
export function showProblem(control, message) {
  clearProblem(control);
  const note = element("p", { id: `${control.id}-problem`, className: "problem", textContent: message });
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-errormessage", note.id);
  // Above a text area, which may be higher than the screen; below other controls.
  if (control.matches("textarea")) control.before(note);
  else (control.closest(".field, .picker") ?? control.parentElement).append(note);
  const section = control.closest("details");
  if (section) section.open = true;
}

/** Removes the problem of a control. */
export function clearProblem(control) {
  control.removeAttribute("aria-invalid");
  control.removeAttribute("aria-errormessage");
  byId(`${control.id}-problem`)?.remove();
}

/** Removes all problems. */
export function clearProblems() {
  for (const control of document.querySelectorAll("[aria-invalid]")) clearProblem(control);
}

function isSetting(name) {
  return byId("settings-form").contains(byId(name));
}
