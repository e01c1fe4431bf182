// What the playground asks of the gateway, and what can go wrong with it. Knows no page.

import { eventData } from "./sse.js";

/** The gateway refused or gave up: its own words, and the field that it means. */
export class ApiError extends Error {
  constructor(status, { message, param = null, type = null }) {
    super(message);
    this.status = status; // 0: in the middle of an answer
    this.param = param;
    this.type = type;
  }
}

/** Nobody answered, or the answer broke off. */
export class ConnectionLost extends Error {}

/** The models that can be asked. */
export async function listModels(apiKey) {
  const response = await send("v1/models", { headers: headersOf(apiKey), signal: AbortSignal.timeout(15_000) });
  return (await bodyOf(response)).data;
}

/** The chunks of a chat's answer, as they come. Abort the signal to stop it. */
export async function* streamChat(body, apiKey, signal) {
  const headers = { "content-type": "application/json", ...headersOf(apiKey) };
  const response = await send("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  let isComplete = false;
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") {
        isComplete = true;
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, chunk.error);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ConnectionLost("The connection broke off; the answer is not complete.", { cause: error });
  }
  if (!isComplete) throw new ConnectionLost("The answer ended before the gateway said that it was complete.");
}

async function send(path, options) {
  try {
    return await fetch(new URL(path, document.baseURI), { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const how = error.name === "TimeoutError" ? "does not answer in time" : "cannot be reached";
    throw new ConnectionLost(`The gateway at ${location.host} ${how}. Is it running?`, { cause: error });
  }
}

function headersOf(apiKey) {
  return apiKey ? { authorization: `Bearer ${apiKey}` } : {};
}

async function bodyOf(response) {
  if (!response.ok) throw await refusal(response);
  return response.json();
}

async function refusal(response) {
  const fallback = { message: `The gateway answered ${response.status} ${response.statusText}.` };
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error?.message ? error : fallback);
  } catch {
    return new ApiError(response.status, fallback);
  }
}
