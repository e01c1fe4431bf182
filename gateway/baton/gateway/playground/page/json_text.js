// Parses JSON typed by people, with the same error messages in every browser.

const MAX_DEPTH = 200;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const WORDS = ["true", "false", "null"];

/** Invalid JSON. Lines and columns start at 1. */
export class JsonProblem extends Error {
  constructor(text, at, what) {
    const before = text.slice(0, at).split("\n");
    super(`Line ${before.length}, column ${before.at(-1).length + 1}: ${what}.`);
    this.line = before.length;
    this.column = before.at(-1).length + 1;
    this.at = at;
  }
}

/** Parses a value. Throws JsonProblem. */
export function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    new Checker(text).check();
    throw new JsonProblem(text, text.length, error.message); // the checker found no error
  }
}

/** Returns indented JSON if the text is JSON, else the text. */
export function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

class Checker {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  check() {
    this.value(0);
    this.space();
    if (this.at < this.text.length) this.fail(`nothing may follow the value, but ${this.here()} does`);
  }

  value(depth) {
    this.space();
    if (depth > MAX_DEPTH) this.fail(`more than ${MAX_DEPTH} levels deep`);
    const char = this.text[this.at];
    if (char === "{") return this.members("}", depth, () => this.member(depth));
    if (char === "[") return this.members("]", depth, () => this.value(depth + 1));
    if (char === '"') return this.string();
    const word = WORDS.find((one) => this.text.startsWith(one, this.at));
    NUMBER.lastIndex = this.at;
    const length = word?.length ?? NUMBER.exec(this.text)?.[0].length;
    if (!length) this.fail(`a value is expected, not ${this.here()}`);
    this.at += length;
    return undefined;
  }

  members(close, depth, one) {
    const opened = this.at++;
    this.space();
    if (this.text[this.at] === close) return void this.at++;
    for (;;) {
      one();
      this.space();
      const char = this.text[this.at];
      if (char === close) return void this.at++;
      if (char === undefined) this.fail(`${this.text[opened]} is never closed`, opened);
      if (char !== ",") this.fail(`"," or "${close}" is expected, not ${this.here()}`);
      this.at++;
      this.space();
      if (this.text[this.at] === close) this.fail(`no "," may come before "${close}"`);
    }
  }

  member(depth) {
    this.space();
    if (this.text[this.at] !== '"') this.fail(`a name in double quotes is expected, not ${this.here()}`);
    this.string();
    this.space();
    if (this.text[this.at] !== ":") this.fail(`":" is expected, not ${this.here()}`);
    this.at++;
    this.value(depth + 1);
  }

  string() {
    const opened = this.at++;
    for (;;) {
      const char = this.text[this.at];
      if (char === undefined) this.fail("the text is never closed", opened);
      if (char === '"') return void this.at++;
      if (char < " ") this.fail("a line break or control character in a text has to be escaped");
      if (char === "\\") this.escape();
      this.at++;
    }
  }

  escape() {
    const rest = this.text.slice(this.at + 1, this.at + 6);
    if (!/^(?:["\\/bfnrt]|u[0-9a-fA-F]{4})/.test(rest)) this.fail("an unknown escape");
    this.at++; // skips the escaped character, which may be a quote
  }

  space() {
    while (" \t\n\r".includes(this.text[this.at] ?? "x")) this.at++;
  }

  here() {
    const char = String.fromCodePoint(this.text.codePointAt(this.at) ?? 0);
    return this.at < this.text.length ? `"${char === "\n" ? "\\n" : char}"` : "the end";
  }

  fail(what, at = this.at) {
    throw new JsonProblem(this.text, at, what);
  }
}
