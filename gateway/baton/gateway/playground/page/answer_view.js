// Shows one answer while it streams and afterwards.

import { copyFrom } from "./clipboard.js";
import { actionButton, element, fitHeight } from "./dom.js";
import { figuresOf, tokens } from "./figures.js";
import { indented } from "./json_text.js";
import { MarkdownView, codeBlock } from "./markdown.js";

/** An article. `actions`: regenerate(), answerCalls(texts), showField(error), which returns whether it exists. */
export class AnswerView {
  constructor(answer, number, actions) {
    this.answer = answer;
    this.actions = actions;
    this.node = element("article", { className: "turn answer", attributes: { "aria-label": `Answer ${number}` } });
    this.reasoning = reasoningNode();
    this.text = element("div", { className: "prose" });
    this.markdown = new MarkdownView(this.text);
    this.calls = element("div", { className: "calls" });
    this.foot = element("footer", { className: "foot" });
    this.node.append(this.reasoning.node, this.text, this.calls, this.foot);
    this.update();
  }

  /** Updates the article to the answer's current state. */
  update() {
    const { answer } = this;
    this.node.classList.toggle("is-waiting", answer.state === "waiting");
    this.node.setAttribute("aria-busy", String(answer.isRunning));
    this._updateReasoning();
    if (answer.isJson) this._updateJson();
    else this.markdown.update(answer.content);
    this._updateCalls();
    this._updateFoot();
  }

  _updateReasoning() {
    const { answer, reasoning } = this;
    reasoning.node.hidden = !answer.reasoning;
    if (!answer.reasoning) return;
    const isThinking = answer.isRunning && !answer.hasSubstance;
    const thought = answer.usage?.completion_tokens_details?.reasoning_tokens;
    reasoning.name.textContent = isThinking ? "Thinking" : "Reasoning";
    reasoning.size.textContent = thought ? tokens(thought) : "";
    reasoning.markdown.update(answer.reasoning);
  }

  _updateJson() {
    const { answer } = this;
    if (!answer.content) return;
    const text = answer.isRunning ? answer.content : indented(answer.content);
    this.text.replaceChildren(codeBlock(text, "json"));
  }

  _updateCalls() {
    const { answer } = this;
    if (!answer.toolCalls.length) return;
    const open = !answer.isRunning && answer.state === "done" && this.actions.awaitsResults(answer);
    if (!open) {
      this.calls.replaceChildren(...answer.toolCalls.map((call) => callNode(call)));
      return;
    }
    if (this.calls.querySelector("form")) return;
    this.calls.replaceChildren(this._resultForm());
  }

  _resultForm() {
    const areas = this.answer.toolCalls.map((call, index) => resultArea(call, index));
    const form = element("form", { className: "results" });
    this.answer.toolCalls.forEach((call, index) => form.append(callNode(call), areas[index].label, areas[index].area));
    const name = areas.length > 1 ? "Send the results" : "Send the result";
    form.append(element("button", { type: "submit", className: "primary", textContent: name }));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.answerCalls(areas.map(({ area }) => area.value));
    });
    return form;
  }

  _updateFoot() {
    const { answer } = this;
    const figures = element("dl", { className: "figures" });
    for (const [name, value] of figuresOf(answer)) {
      figures.append(element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value })));
    }
    const parts = [this._errorNode(), answer.usage || !answer.isRunning ? figures : null];
    if (!answer.isRunning) parts.push(this._actionsNode());
    this.foot.replaceChildren(...parts.filter(Boolean));
  }

  _errorNode() {
    const { error } = this.answer;
    if (!error) return null;
    const title = error.status ? `Refused (${error.status})` : "The answer failed";
    const node = element("div", { className: "failure", attributes: { role: "alert" } });
    node.append(element("strong", { textContent: title }), element("p", { textContent: error.message }));
    if (error.param) {
      const name = element("code", { textContent: error.param });
      node.append(element("p", { className: "quiet" }, "Field: ", name));
    }
    if (this.actions.hasField(error)) {
      node.append(actionButton("Show the setting", () => this.actions.showField(error)));
    }
    return node;
  }

  _actionsNode() {
    const { answer } = this;
    const row = element("div", { className: "actions" });
    const text = answer.content || answer.toolCalls.map((call) => `${call.name}(${call.arguments})`).join("\n");
    if (text) {
      const copy = actionButton("Copy", () => copyFrom(copy, text), "Copy the answer");
      row.append(copy);
    }
    const again = answer.error ? "Try again" : "Regenerate";
    row.append(actionButton(again, () => this.actions.regenerate(), answer.error ? again : "Regenerate the answer"));
    return row;
  }
}

function reasoningNode() {
  const name = element("span");
  const size = element("span", { className: "quiet" });
  const body = element("div", { className: "prose thought" });
  const summary = element("summary", {}, name, " ", size);
  const node = element("details", { className: "reasoning", hidden: true }, summary, body);
  return { node, name, size, markdown: new MarkdownView(body) };
}

function callNode(call) {
  const head = element("p", { className: "call-name" }, "Calls ", element("code", { textContent: call.name }));
  const code = element("code", { textContent: indented(call.arguments) });
  return element("div", { className: "call" }, head, element("pre", { tabIndex: 0 }, code));
}

let lastResultId = 0;

function resultArea(call, index) {
  const id = `result-${++lastResultId}`;
  const area = element("textarea", { id, rows: 1, required: true, className: "code" });
  area.placeholder = "What the function returned";
  area.addEventListener("input", () => fitHeight(area));
  const label = element("label", { htmlFor: id, textContent: `Result of call ${index + 1}, ${call.name}` });
  return { area, label };
}
