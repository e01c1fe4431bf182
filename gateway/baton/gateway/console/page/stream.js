// The console's requests to the gateway. Knows nothing of the page.

import { eventData } from "./sse.js";

const SILENCE_MS = 6000; // snapshots arrive every second
const ASK_MS = 10_000;

/** The gateway refused a request. The message is the gateway's. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  /** Returns whether a valid key would help. */
  get wantsKey() {
    return this.status === 401 || this.status === 403;
  }
}

/** The gateway did not answer, or the stream ended. */
export class ConnectionLost extends Error {}

/** Yields snapshots. Ends only with an error, or when the signal is aborted. */
export async function* snapshots(apiKey, signal) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), ASK_MS);
  const either = AbortSignal.any([signal, silence.signal]);
  try {
    const response = await send("console/stream", apiKey, either);
    for await (const data of eventData(response.body)) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      yield JSON.parse(data);
    }
    throw new ConnectionLost("The gateway ended the connection.");
  } catch (error) {
    if (error instanceof Refused || signal.aborted) throw error;
    if (silence.signal.aborted) throw new ConnectionLost("The gateway has sent nothing for a while.");
    throw error instanceof ConnectionLost ? error : new ConnectionLost("The connection was lost.", { cause: error });
  } finally {
    clearTimeout(timer);
  }
}

/** Requests the explanation of a placement. `name` is placement_id or request_id. */
export async function explain(apiKey, name, value) {
  const path = `console/placement?${new URLSearchParams({ [name]: value })}`;
  const response = await send(path, apiKey, AbortSignal.timeout(ASK_MS));
  return response.json();
}

async function send(path, apiKey, signal) {
  const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { cache: "no-store", headers, signal });
  } catch (error) {
    if (signal.aborted && error.name === "AbortError") throw error;
    throw new ConnectionLost(`The gateway at ${location.host} cannot be reached. Is it running?`, { cause: error });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const fallback = `The gateway answered ${response.status} ${response.statusText}.`;
  try {
    const { error } = await response.json();
    return new Refused(response.status, error?.message || fallback);
  } catch {
    return new Refused(response.status, fallback);
  }
}
