// Formats values for people. An unknown value is a dash.

const COUNT = new Intl.NumberFormat("en");
const NOTHING = "–";
const PREFIXES = ["", "k", "M", "G", "T", "P"];

/** Formats an integer with separators. */
export function count(value) {
  return value === null ? NOTHING : COUNT.format(Math.round(value));
}

/** Formats a part of a whole: 2 of 8. */
export function outOf(part, whole) {
  return part === null ? NOTHING : `${count(part)} of ${count(whole)}`;
}

/** Formats a number with three digits: 1.24 M. */
export function short(value) {
  if (value === null) return NOTHING;
  let at = 0;
  while (Math.abs(value) >= 999.5 && at < PREFIXES.length - 1) {
    value /= 1000;
    at += 1;
  }
  const digits = at === 0 && (value === 0 || value >= 99.5) ? 0 : value >= 99.5 ? 0 : value >= 9.95 ? 1 : 2;
  const text = at === 0 && Number.isInteger(value) ? String(value) : value.toFixed(digits);
  return at === 0 ? text : `${text} ${PREFIXES[at]}`;
}

/** Formats a rate per second. */
export function rate(value) {
  return value === null ? NOTHING : `${short(value)}/s`;
}

/** Formats bytes per second. */
export function bandwidth(value) {
  return value === null ? NOTHING : `${bytes(value)}/s`;
}

/** Formats bytes. */
export function bytes(value) {
  if (value === null) return NOTHING;
  const text = short(value);
  return text.includes(" ") ? `${text}B` : `${text} B`;
}

/** Formats a fraction in percent. */
export function percent(part) {
  if (part === null) return NOTHING;
  const hundredth = part * 100;
  return `${hundredth > 0 && hundredth < 9.95 ? hundredth.toFixed(1) : Math.round(hundredth)} %`;
}

/** Formats seconds. */
export function duration(seconds) {
  if (seconds === null) return NOTHING;
  if (seconds === 0) return "0 ms";
  if (seconds < 0.00995) return `${(seconds * 1000).toFixed(2)} ms`;
  if (seconds < 0.0995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 99.5) return `${seconds.toFixed(2)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** Formats an age as a short text. */
export function age(seconds) {
  if (seconds < 0.95) return "now";
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  if (seconds < 3570) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

/** Formats a count with its noun: 1 worker, 2 workers. */
export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}
