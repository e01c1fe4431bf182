// The turns of a conversation on the page.

import { AnswerView } from "./answer_view.js";
import { copyFrom } from "./clipboard.js";
import { actionButton, byId, element, fitHeight } from "./dom.js";

const NEAR_END = 80; // pixels; a reader this close to the end keeps following it

/** `actions`: edit(index, text), regenerate(index), and those of AnswerView. */
export class Transcript {
  constructor(actions) {
    this.root = byId("transcript");
    this.scroller = byId("scroller");
    this.actions = actions;
    this.shown = []; // turns
    this.current = null; // the view of the last answer
    this.follows = true;
    this.frame = 0;
    this.scroller.addEventListener("scroll", () => this._scrolled());
    byId("to-end").addEventListener("click", () => this.toEnd());
  }

  /** Shows these turns. Turns already shown keep their nodes. */
  show(conversation) {
    const { turns } = conversation;
    let same = 0;
    while (same < turns.length && this.shown[same] === turns[same]) same++;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.current?.update(); // it may no longer wait for results
    turns.slice(same).forEach((turn, index) => this.root.append(this._nodeOf(turn, same + index)));
    this.shown = [...turns];
    byId("welcome").hidden = !conversation.isEmpty;
    this.toEnd();
  }

  /** Shows the growth of the last answer in the next frame. */
  grow() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.current?.update();
      if (this.follows) this.toEnd();
    });
  }

  /** Shows the complete last answer now. */
  finish() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.current?.update();
    if (this.follows) this.toEnd();
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.follows = true;
    byId("to-end").hidden = true;
  }

  _scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
    byId("to-end").hidden = this.follows;
  }

  _nodeOf(turn, index) {
    if (turn.kind === "user") return this._userNode(turn, index);
    if (turn.kind === "result") return resultNode(turn);
    const actions = { ...this.actions, regenerate: () => this.actions.regenerate(index) };
    this.current = new AnswerView(turn.answer, index + 1, actions);
    return this.current.node;
  }

  _userNode(turn, index) {
    const text = element("p", { className: "said", textContent: turn.text });
    const copy = actionButton("Copy", () => copyFrom(copy, turn.text), "Copy the message");
    const node = element("article", { className: "turn user", attributes: { "aria-label": `Message ${index + 1}` } });
    const edit = actionButton("Edit", () => this._edit(node, turn, index), "Edit the message");
    node.append(text, element("div", { className: "actions" }, copy, edit));
    return node;
  }

  _edit(node, turn, index) {
    const shown = [...node.childNodes];
    const area = element("textarea", { value: turn.text, attributes: { "aria-label": "Message" } });
    const back = () => {
      node.replaceChildren(...shown);
      shown.at(-1).lastChild.focus();
    };
    const cancel = actionButton("Cancel", back);
    const send = element("button", { type: "submit", className: "primary", textContent: "Send" });
    const form = element("form", { className: "edit" }, area, element("div", { className: "actions" }, cancel, send));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(index, area.value.trim());
    });
    area.addEventListener("input", () => fitHeight(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        back();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    node.replaceChildren(form);
    fitHeight(area);
    area.focus();
  }
}

function resultNode(turn) {
  const head = element("p", { className: "call-name" }, "Result of ", element("code", { textContent: turn.name }));
  const body = element("pre", { tabIndex: 0 }, element("code", { textContent: turn.text }));
  const attributes = { "aria-label": `Result of ${turn.name}` };
  return element("article", { className: "turn result", attributes }, head, body);
}
