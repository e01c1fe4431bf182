// The turns of a chat, and the API messages made from them. Knows nothing of the page.

import { Answer } from "./answer.js";

/** Turns are {kind: "user", text}, {kind: "answer", answer} and {kind: "result", callId, name, text}. */
export class Conversation {
  constructor(turns = []) {
    this.turns = turns;
  }

  static from(kept) {
    return new Conversation(kept.map((turn) => (turn.answer ? { ...turn, answer: Answer.from(turn.answer) } : turn)));
  }

  get isEmpty() {
    return this.turns.length === 0;
  }

  get lastAnswer() {
    return this.turns.at(-1)?.answer ?? null;
  }

  ask(text) {
    this.turns.push({ kind: "user", text });
  }

  addAnswer(answer) {
    this.turns.push({ kind: "answer", answer });
  }

  /** Adds the results of the last answer's calls, in the order of the calls. */
  addResults(texts) {
    this.lastAnswer.toolCalls.forEach((call, index) => {
      this.turns.push({ kind: "result", callId: call.id, name: call.name, text: texts[index] });
    });
  }

  /** Removes the turn at this index and all later ones. */
  cutBefore(index) {
    this.turns.length = index;
  }

  /** Returns the messages for the API. Leaves out unanswered questions, except the last one. */
  toMessages(system) {
    const messages = system ? [{ role: "system", content: system }] : [];
    this.turns.forEach((turn, index) => {
      if (turn.kind === "user") {
        const next = this.turns[index + 1];
        const isUnanswered = next?.answer && !next.answer.isRunning && !next.answer.hasSubstance;
        if (!isUnanswered || index + 2 === this.turns.length) messages.push({ role: "user", content: turn.text });
      } else if (turn.kind === "result") {
        messages.push({ role: "tool", tool_call_id: turn.callId, content: turn.text });
      } else if (turn.answer.hasSubstance) {
        messages.push(turn.answer.toMessage());
      }
    });
    return messages;
  }
}
