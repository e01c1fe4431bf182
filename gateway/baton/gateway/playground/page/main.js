// The playground: connects its parts and runs one answer at a time.

import { ApiError, streamChat } from "./api.js";
import { Answer } from "./answer.js";
import { copyFrom } from "./clipboard.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { tokens } from "./figures.js";
import { ModelPicker } from "./model_picker.js";
import { Modes } from "./modes.js";
import { Panel } from "./panel.js";
import { controlOf, showProblem } from "./problems.js";
import { asCurl, requestBody } from "./request.js";
import { Search } from "./search.js";
import { Settings } from "./settings.js";
import { forget, keep, recall } from "./store.js";
import { Transcript } from "./transcript.js";

const MAX_SPOKEN = 2000; // characters of an answer announced to a screen reader at once

class Playground {
  constructor() {
    this.settings = new Settings();
    this.panel = new Panel();
    this.search = new Search(() => ({ model: this.picker.model, apiKey: this.settings.apiKey }), (text) => this._say(text));
    this.modes = new Modes();
    this.picker = new ModelPicker(() => this.settings.apiKey, (tasks) => this.modes.suit(tasks));
    this.conversation = Conversation.from(recall("conversation", []));
    this.running = null; // the AbortController of the running answer
    this.transcript = new Transcript({
      edit: (index, text) => this.edit(index, text),
      regenerate: (index) => this.regenerate(index),
      answerCalls: (texts) => this.answerCalls(texts),
      awaitsResults: (answer) => answer === this.conversation.lastAnswer,
      hasField: (error) => controlOf(error.param, error.status) !== null,
      showField: (error) => this.panel.reveal(controlOf(error.param, error.status)),
    });
    this.composer = new Composer((text) => this.send(text), () => this.stop());
    this.transcript.show(this.conversation);
    this._listen();
    this.picker.load();
    if (!this.panel.coversChat) (this.modes.name === "chat" ? this.composer : this.search.query).focus();
  }

  /** Sends a new message. */
  send(text) {
    const values = this._values();
    if (!values) return;
    this.conversation.ask(text);
    this.composer.text = "";
    this._answer(values);
  }

  /** Replaces the message at this index and sends it again. */
  edit(index, text) {
    this._again(index, () => this.conversation.ask(text));
  }

  /** Requests the answer at this index again. */
  regenerate(index) {
    this._again(index, () => {});
  }

  /** Sends the results of the model's calls. */
  answerCalls(texts) {
    const values = this._values();
    if (!values || this.running) return;
    this.conversation.addResults(texts);
    this._answer(values);
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.running = null;
    this.conversation = new Conversation();
    forget("conversation");
    this.composer.setBusy(false);
    this.transcript.show(this.conversation);
    this.composer.focus();
  }

  showCurl() {
    if (this.modes.name === "search") this._showCurl("v1/rerank", this.search.body, "next search");
    else this._showChatCurl();
  }

  _showChatCurl() {
    const values = this._values();
    if (!values) return;
    const messages = this.conversation.toMessages(this.settings.system);
    const draft = byId("prompt").value.trim();
    if (draft) messages.push({ role: "user", content: draft });
    this._showCurl("v1/chat/completions", requestBody(this.picker.model, values, messages), "next answer");
  }

  _showCurl(path, body, what) {
    const key = this.settings.apiKey;
    byId("curl-text").textContent = asCurl(new URL(path, document.baseURI).href, body, key);
    const note = `What the ${what} would be asked with.`;
    byId("curl-note").textContent = key ? `${note} Put your key into BATON_API_KEY.` : note;
    byId("curl").showModal();
  }

  _again(index, change) {
    const values = this._values();
    if (!values || this.running) return;
    this.conversation.cutBefore(index);
    change();
    this._answer(values);
  }

  _values() {
    const values = this.settings.read();
    if (!values) this.panel.reveal(document.querySelector(".settings [aria-invalid]"));
    return values;
  }

  async _answer(values) {
    const { conversation } = this;
    const body = requestBody(this.picker.model, values, conversation.toMessages(this.settings.system));
    const answer = new Answer(this.picker.model, performance.now());
    answer.isJson = values.format !== "text";
    conversation.addAnswer(answer);
    const abort = (this.running = new AbortController());
    this.composer.setBusy(true);
    this.composer.focus();
    this.transcript.show(conversation);
    keep("conversation", conversation.turns);
    this._say("Waiting for the answer.");
    await this._fill(answer, body, abort.signal);
    if (this.running !== abort) return; // the conversation was cleared in the meantime
    this.running = null;
    this.composer.setBusy(false);
    this.transcript.finish();
    keep("conversation", conversation.turns);
    this._say(wordsOf(answer));
    if (!this.picker.model) this.picker.load();
  }

  async _fill(answer, body, signal) {
    try {
      for await (const chunk of streamChat(body, this.settings.apiKey, signal)) {
        answer.add(chunk, performance.now());
        this.transcript.grow();
      }
      answer.end("done");
    } catch (error) {
      if (signal.aborted) answer.end("stopped");
      else this._fail(answer, error);
    }
  }

  _fail(answer, error) {
    const { message, status = 0, param = null } = error;
    answer.end("failed", { message, status, param });
    if (!(error instanceof ApiError)) return;
    const control = controlOf(param, status);
    if (control) showProblem(control, message);
  }

  _listen() {
    byId("new-chat").addEventListener("click", () => this.clear());
    byId("show-curl").addEventListener("click", () => this.showCurl());
    byId("copy-curl").addEventListener("click", (event) => copyFrom(event.target, byId("curl-text").textContent));
    byId("suggestions").addEventListener("click", (event) => {
      if (event.target.matches("button")) this.send(event.target.textContent);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || byId("curl").open) return;
      if (this.panel.coversChat) this.panel.close();
      else if (this.modes.name === "search") this.search.stop();
      else this.stop();
    });
  }

  /** Announces a text to screen readers. */
  _say(text) {
    byId("status").textContent = text;
  }
}

function wordsOf(answer) {
  if (answer.error) return ""; // the answer contains an alert
  const size = answer.usage ? `, ${tokens(answer.usage.completion_tokens)}` : "";
  const end = answer.state === "stopped" ? "Stopped" : "The answer is complete";
  const calls = answer.toolCalls.map((call) => `Calls ${call.name}.`).join(" ");
  return `${end}${size}. ${answer.content.slice(0, MAX_SPOKEN)} ${calls}`;
}

new Playground();
