// One answer of the model: its text, reasoning, calls and figures, gathered from the chunks of a stream.

/** Grows by `add`. Times are milliseconds of performance.now(). */
export class Answer {
  constructor(model, now) {
    this.model = model;
    this.content = "";
    this.reasoning = "";
    this.toolCalls = []; // of {id, name, arguments}
    this.state = "waiting"; // then streaming; then done, stopped or failed
    this.finishReason = null;
    this.usage = null;
    this.error = null; // of {message, status, param}
    this.isJson = false;
    this.ttft = null;
    this.elapsed = 0; // between the first piece and the last
    this.startedAt = now;
    this.firstAt = null;
  }

  /** An answer as it was kept. One that was still growing then has been stopped. */
  static from(fields) {
    const answer = Object.assign(new Answer(fields.model, 0), fields);
    if (answer.isRunning) answer.state = "stopped";
    return answer;
  }

  get isRunning() {
    return this.state === "waiting" || this.state === "streaming";
  }

  /** Whether the model said anything that a later request has to repeat. */
  get hasSubstance() {
    return Boolean(this.content || this.toolCalls.length);
  }

  /** Tokens a second after the first one; null where there is nothing to divide. */
  get tokensPerSecond() {
    const tokens = this.usage?.completion_tokens ?? 0;
    return tokens > 1 && this.elapsed > 0 ? ((tokens - 1) * 1000) / this.elapsed : null;
  }

  /** Takes in one chunk. */
  add(chunk, now) {
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    const { content, reasoning, reasoning_content: olderName, tool_calls: calls } = choice.delta;
    const thought = reasoning ?? olderName;
    if (!content && !thought && !calls) return;
    this._tick(now);
    this.content += content ?? "";
    this.reasoning += thought ?? "";
    for (const call of calls ?? []) this._addCall(call);
  }

  /** The answer is over. */
  end(state, error = null) {
    this.state = state;
    this.error = error;
  }

  /** The message that stands for this answer in the next request. */
  toMessage() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning = this.reasoning;
    if (this.toolCalls.length) {
      message.tool_calls = this.toolCalls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
    }
    return message;
  }

  _tick(now) {
    this.state = "streaming";
    if (this.firstAt === null) {
      this.firstAt = now;
      this.ttft = now - this.startedAt;
    }
    this.elapsed = now - this.firstAt;
  }

  _addCall(delta) {
    const call = (this.toolCalls[delta.index] ??= { id: "", name: "", arguments: "" });
    if (delta.id) call.id = delta.id;
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }
}
