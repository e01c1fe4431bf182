// Formats the usage and times of an answer.

const COUNT = new Intl.NumberFormat("en");
const ENDS = { length: "cut at the token limit", tool_calls: "calls functions", content_filter: "filtered" };

/** Returns pairs of a name and a value. */
export function figuresOf(answer) {
  const pairs = [];
  const { usage, ttft, tokensPerSecond } = answer;
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const thought = usage.completion_tokens_details?.reasoning_tokens ?? 0;
    pairs.push(["Prompt", `${tokens(usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}`]);
    pairs.push(["Answer", `${tokens(usage.completion_tokens)}${thought ? `, ${count(thought)} reasoning` : ""}`]);
  }
  if (ttft !== null) pairs.push(["First token", duration(ttft)]);
  if (tokensPerSecond !== null) pairs.push(["Speed", `${rate(tokensPerSecond)} tokens/s`]);
  const end = answer.state === "stopped" ? "stopped by you" : ENDS[answer.finishReason];
  if (end && !answer.isRunning) pairs.push(["End", end]);
  return pairs;
}

/** Formats an integer with separators. */
export function count(number) {
  return COUNT.format(number);
}

/** Formats a number of tokens. */
export function tokens(number) {
  return `${count(number)} ${number === 1 ? "token" : "tokens"}`;
}

function duration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}

function rate(number) {
  return number < 100 ? number.toFixed(1) : count(Math.round(number));
}
