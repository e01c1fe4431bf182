// Renders Markdown within a line: code, emphasis, links. The model's text becomes text nodes; markup stays text.

import { element } from "./dom.js";

const MAX_DEPTH = 4;
const CODE = /(`+)/y;
// Every pattern stops at its own delimiter, so that parsing takes linear time.
const SPANS = [
  { tag: "strong", pattern: /\*\*(?=[^\s*])((?:[^*]|\*(?!\*))+)\*\*/y },
  { tag: "em", pattern: /\*(?=[^\s*])([^*\n]+)\*/y },
  { tag: "strong", pattern: /\b__(?=[^\s_])([^_]+)__\b/y },
  { tag: "em", pattern: /\b_(?=[^\s_])([^_\n]+)_\b/y },
  { tag: "del", pattern: /~~(?=[^\s~])([^~]+)~~/y },
];
const LINK = /\[([^\][\n]{1,500})\]\((https?:\/\/[^\s()<>"]{1,2000})\)/y;
const BARE_LINK = /(?<!\]\()\bhttps?:\/\/[^\s<>"'`]{1,2000}[^\s<>"'`.,:;!?)\]*_~]/y;
const ESCAPED = /\\([\\`*_{}[\]()#+\-.!~|>])/y;
const SPECIAL = /[\\`*_~[]|h(?=ttps?:\/\/)/g;

/** Returns the nodes of a piece of text. */
export function inlineNodes(text, depth = 0) {
  const nodes = [];
  let plain = "";
  let at = 0;
  const push = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const found = depth < MAX_DEPTH ? spanAt(text, at, depth) : null;
    if (found?.node) push(found.node);
    else plain += found?.text ?? text[at];
    at += found?.length ?? 1;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function spanAt(text, at, depth) {
  const char = text[at];
  if (char === "\\") return escapeAt(text, at);
  if (char === "`") return codeAt(text, at);
  if (char === "[") return linkAt(text, at, depth);
  if (char === "h") return bareLinkAt(text, at);
  for (const { tag, pattern } of SPANS) {
    const match = matchAt(pattern, text, at);
    if (match) return { node: element(tag, {}, ...inlineNodes(match[1], depth + 1)), length: match[0].length };
  }
  return null;
}

function escapeAt(text, at) {
  const match = matchAt(ESCAPED, text, at);
  return match && { text: match[1], length: 2 };
}

function codeAt(text, at) {
  const [marks] = matchAt(CODE, text, at);
  const end = text.indexOf(marks, at + marks.length);
  if (end < 0) return { text: marks, length: marks.length };
  const code = text.slice(at + marks.length, end);
  return { node: element("code", { textContent: code.trim() || code }), length: end + marks.length - at };
}

function linkAt(text, at, depth) {
  if (text[at - 1] === "!") return null; // an image would be loaded from another server
  const match = matchAt(LINK, text, at);
  return match && { node: linkNode(match[2], inlineNodes(match[1], depth + 2)), length: match[0].length };
}

function bareLinkAt(text, at) {
  const match = matchAt(BARE_LINK, text, at);
  return match && { node: linkNode(match[0], [match[0]]), length: match[0].length };
}

/** Makes a link without a referrer that shows its target. */
function linkNode(href, children) {
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}
