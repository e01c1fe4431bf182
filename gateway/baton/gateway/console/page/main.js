// The console: streams the gateway's snapshots and shows the latest one.

import { Detail } from "./detail.js";
import { byId } from "./dom.js";
import { Flows } from "./flows.js";
import { duration } from "./format.js";
import { Placements } from "./placements.js";
import { forget, keep, recall } from "./store.js";
import { explain, Refused, snapshots } from "./stream.js";
import { Tiles } from "./tiles.js";
import { Workers } from "./workers.js";

const FIRST_DELAY_MS = 500;
const MAX_DELAY_MS = 5000;
const STALE_SECONDS = 3; // routers reply every second

class Console {
  constructor() {
    this.apiKey = recall("api_key", "");
    this.isPaused = false;
    this.hasShown = false; // whether a snapshot was shown
    this.stopped = null; // the AbortController of the current stream
    this.detail = new Detail();
    this.parts = [new Tiles(byId("tiles")), new Flows(), new Workers(), new Placements((id) => this.open("placement_id", id))];
    this._listen();
    this.follow();
  }

  /** Streams snapshots until the page is hidden or a key is required. */
  async follow() {
    this.stopped?.abort();
    const stopped = (this.stopped = new AbortController());
    let delay = FIRST_DELAY_MS;
    while (!stopped.signal.aborted) {
      try {
        for await (const snapshot of snapshots(this.apiKey, stopped.signal)) {
          if (stopped.signal.aborted) return;
          delay = FIRST_DELAY_MS;
          this.take(snapshot);
        }
      } catch (error) {
        if (stopped.signal.aborted) return;
        if (error instanceof Refused && error.wantsKey) {
          this.askForKey(error);
          return;
        }
        this.lost(error);
      }
      await new Promise((resume) => setTimeout(resume, delay));
      delay = Math.min(MAX_DELAY_MS, delay * 2);
    }
  }

  /** Shows a snapshot. */
  take(snapshot) {
    byId("sign-in").hidden = true;
    byId("change-key").hidden = !this.apiKey;
    byId("fleet").hidden = byId("pause").hidden = false;
    const isStale = snapshot.heard_age === null || snapshot.heard_age > STALE_SECONDS;
    byId("fleet").classList.toggle("stale", isStale);
    this._notice(troubleOf(snapshot));
    if (this.isPaused) return;
    this._live(isStale ? "lost" : "live", isStale ? "No router answers" : "Live");
    if (isStale && this.hasShown) return; // the last snapshot is more useful
    this.hasShown = true;
    for (const part of this.parts) part.show(snapshot);
    const rates = snapshot.window ? `Rates are of the last ${Math.round(snapshot.window)} s.` : "";
    byId("foot").textContent = `Baton ${snapshot.version}. ${rates}`;
  }

  lost(error) {
    this._live("lost", "Reconnecting");
    byId("fleet").classList.add("stale");
    this._notice(`${error.message} What is shown is what was known last.`);
  }

  /** Shows the form for a key. */
  askForKey(refused) {
    const had = Boolean(this.apiKey);
    this._live("locked", "Locked");
    this._notice("");
    byId("fleet").hidden = byId("pause").hidden = true;
    byId("change-key").hidden = true;
    byId("sign-in").hidden = false;
    const isFirst = refused.status === 401 && !had;
    byId("sign-in-reason").textContent = isFirst ? "This gateway shows its fleet to operators only." : refused.message;
    byId("api_key").value = "";
    byId("api_key").focus();
  }

  /** Shows one request. */
  async open(name, value) {
    const problem = byId("find-problem");
    problem.hidden = true;
    try {
      this.detail.show(await explain(this.apiKey, name, value));
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
  }

  _listen() {
    byId("pause").addEventListener("click", () => this._pause(!this.isPaused));
    byId("sign-in").addEventListener("submit", (event) => {
      event.preventDefault();
      this.apiKey = byId("api_key").value.trim();
      keep("api_key", this.apiKey);
      this._live("waiting", "Connecting");
      this.follow();
    });
    byId("change-key").addEventListener("click", () => {
      this.stopped?.abort();
      forget("api_key");
      this.apiKey = "";
      this.askForKey(new Refused(401, ""));
    });
    byId("find").addEventListener("submit", (event) => {
      event.preventDefault();
      const id = byId("find-id").value.trim();
      if (id) this.open("request_id", id);
    });
    // A hidden page requests nothing.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.stopped?.abort();
      else if (byId("sign-in").hidden) this.follow();
    });
  }

  _pause(isPaused) {
    this.isPaused = isPaused;
    byId("pause").setAttribute("aria-pressed", String(isPaused));
    if (isPaused) this._live("paused", "Paused");
    else this._live("waiting", "Connecting");
  }

  _live(state, text) {
    byId("live").dataset.state = state;
    if (byId("live-text").textContent !== text) byId("live-text").textContent = text;
  }

  _notice(text) {
    byId("notice").hidden = !text;
    if (byId("notice").textContent !== text) byId("notice").textContent = text;
  }
}

/** Returns the problems of the whole fleet as a text; empty if there are none. */
function troubleOf({ routers, heard_age, workers, fleet }) {
  const silent = routers.filter((one) => one.problem).map((one) => `${one.address}: ${one.problem}`);
  if (heard_age === null) return `No router has answered yet (${silent.join("; ")}).`;
  if (silent.length === routers.length) {
    return `No router answers (${silent.join("; ")}). What is shown is ${duration(heard_age)} old.`;
  }
  if (silent.length) return `A router does not answer: ${silent.join("; ")}.`;
  if (workers.length && !fleet.num_alive) return "No worker is alive: requests are refused until one comes back.";
  return "";
}

new Console();
