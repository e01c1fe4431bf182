// One answer of the model: text, reasoning, calls and usage, collected from the chunks of a stream.

/** Extended by `add`. Times are in milliseconds of performance.now(). */
export class Answer {
  constructor(model, now) {
    this.model = model;
    this.content = "";
    this.reasoning = "";
    this.toolCalls = []; // {id, name, arguments}
    this.state = "waiting"; // waiting, streaming; finally done, stopped or failed
    this.finishReason = null;
    this.usage = null;
    this.error = null; // {message, status, param}
    this.isJson = false;
    this.ttft = null;
    this.elapsed = 0; // from the first chunk to the last
    this.startedAt = now;
    this.firstAt = null;
  }

  /** Restores a stored answer. An answer that was still streaming counts as stopped. */
  static from(fields) {
    const answer = Object.assign(new Answer(fields.model, 0), fields);
    if (answer.isRunning) answer.state = "stopped";
    return answer;
  }

  get isRunning() {
    return this.state === "waiting" || this.state === "streaming";
  }

  /** Returns whether the answer has content that a later request must repeat. */
  get hasSubstance() {
    return Boolean(this.content || this.toolCalls.length);
  }

  /** Returns tokens per second after the first one, or null if there are too few. */
  get tokensPerSecond() {
    const tokens = this.usage?.completion_tokens ?? 0;
    return tokens > 1 && this.elapsed > 0 ? ((tokens - 1) * 1000) / this.elapsed : null;
  }

  /** Adds one chunk. */
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

  /** Ends the answer. */
  end(state, error = null) {
    this.state = state;
    this.error = error;
  }

  /** Returns the message for this answer in the next request. */
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
