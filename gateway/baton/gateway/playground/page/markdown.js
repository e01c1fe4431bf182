// Renders Markdown as nodes. The text is never parsed as HTML; images and HTML stay text.

import { copyFrom } from "./clipboard.js";
import { actionButton, element } from "./dom.js";
import { inlineNodes } from "./markdown_inline.js";

const MAX_DEPTH = 6;
const MAX_TABLE_RULE = 1000; // characters; its pattern takes quadratic time
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])\s+(?=\S)/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

/** Renders a growing text in `root`. Unchanged blocks keep their nodes, and with them the reader's selection. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.sources = [];
  }

  update(text) {
    const blocks = blocksOf(text);
    let same = 0;
    while (same < this.sources.length && this.sources[same] === blocks[same]?.source) same++;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    this.root.append(...blocks.slice(same).map((block) => block.render(0)));
    this.sources = blocks.map((block) => block.source);
  }
}

/** Returns the blocks of a text in order: {source, render(depth)}. */
export function blocksOf(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const { end, render } = blockAt(lines, at);
    blocks.push({ source: lines.slice(at, end).join("\n"), render });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (FENCE.test(line)) return fenceAt(lines, at);
  if (heading) return { end: at + 1, render: () => headingNode(heading[1].length, heading[2]) };
  if (RULE.test(line)) return { end: at + 1, render: () => element("hr") };
  if (QUOTE.test(line)) return quoteAt(lines, at);
  if (ITEM.test(line)) return listAt(lines, at);
  if (isTable(lines, at)) return tableAt(lines, at);
  return paragraphAt(lines, at);
}

function headingNode(level, text) {
  // The page uses levels 1 and 2, so answers start at level 3.
  return element(`h${Math.min(6, level + 2)}`, {}, ...inlineNodes(text));
}

function fenceAt(lines, at) {
  const [, marks, language] = FENCE.exec(lines[at]);
  let end = at + 1;
  while (end < lines.length && !isClosing(lines[end], marks)) end++;
  const code = lines.slice(at + 1, end).join("\n");
  return { end: Math.min(end + 1, lines.length), render: () => codeBlock(code, language) };
}

function isClosing(line, marks) {
  const text = line.trim();
  return text.length >= marks.length && text === marks[0].repeat(text.length);
}

/** Renders code with its language and a copy button. */
export function codeBlock(code, language) {
  const copy = actionButton("Copy", () => copyFrom(copy, code), "Copy this code");
  const head = element("figcaption", {}, element("span", { textContent: language || "text" }), copy);
  const body = element("pre", { tabIndex: 0 }, element("code", { textContent: code }));
  return element("figure", { className: "code-block" }, head, body);
}

function quoteAt(lines, at) {
  const end = endWhile(lines, at, (line) => QUOTE.test(line));
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, "")).join("\n");
  return { end, render: (depth) => element("blockquote", {}, ...nested(inner, depth)) };
}

function listAt(lines, at) {
  const isOrdered = Boolean(ITEM.exec(lines[at])[3]);
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    const match = ITEM.exec(lines[end]);
    const isBlank = !lines[end].trim();
    const indent = items.at(-1)?.indent ?? 0;
    const isInner = items.length > 0 && (isBlank ? goesOn(lines, end, indent) : indentOf(lines[end]) >= indent);
    if (isInner) items.at(-1).lines.push(lines[end].slice(Math.min(indent, indentOf(lines[end]))));
    else if (match && Boolean(match[3]) === isOrdered) {
      items.push({ indent: match[0].length, lines: [lines[end].slice(match[0].length)] });
    } else if (!isBlank || !nextIsItem(lines, end, isOrdered)) break;
  }
  const start = isOrdered ? Number(ITEM.exec(lines[at])[3]) : 1;
  return { end, render: (depth) => listNode(isOrdered, start, items, depth) };
}

function listNode(isOrdered, start, items, depth) {
  const list = element(isOrdered ? "ol" : "ul");
  if (isOrdered && start !== 1) list.start = start;
  list.append(...items.map((item) => element("li", {}, ...itemNodes(item.lines, depth))));
  return list;
}

function itemNodes(lines, depth) {
  if (lines.length === 1 && !ITEM.test(lines[0])) return inlineNodes(lines[0]);
  return nested(lines.join("\n"), depth);
}

function nextIsItem(lines, at, isOrdered) {
  const match = ITEM.exec(lines[at + 1] ?? "");
  return match !== null && Boolean(match[3]) === isOrdered;
}

function goesOn(lines, at, indent) {
  const next = lines[at + 1] ?? "";
  return Boolean(next.trim()) && indentOf(next) >= indent;
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function isTable(lines, at) {
  const rule = lines[at + 1];
  if (!lines[at].includes("|") || !rule?.includes("|") || rule.length > MAX_TABLE_RULE) return false;
  return TABLE_RULE.test(rule);
}

function tableAt(lines, at) {
  const end = endWhile(lines, at, (line) => line.includes("|"));
  const cell = (tag, text) => element(tag, {}, ...inlineNodes(text));
  const row = (tag) => (line) => element("tr", {}, ...cellsOf(line).map((text) => cell(tag, text)));
  return {
    end,
    render: () => {
      const head = element("thead", {}, row("th")(lines[at]));
      const body = element("tbody", {}, ...lines.slice(at + 2, end).map(row("td")));
      return element("div", { className: "table", tabIndex: 0 }, element("table", {}, head, body));
    },
  };
}

function cellsOf(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function paragraphAt(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end++;
  const text = lines.slice(at, end).join("\n");
  return { end, render: () => element("p", {}, ...inlineNodes(text)) };
}

function startsBlock(lines, at) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(lines[at])) || isTable(lines, at);
}

function nested(text, depth) {
  if (depth >= MAX_DEPTH) return [text];
  return blocksOf(text).map((block) => block.render(depth + 1));
}

function endWhile(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end])) end++;
  return end;
}
