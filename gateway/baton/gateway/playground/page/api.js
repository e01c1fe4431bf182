// The playground's requests to the gateway, and their errors. Knows nothing of the page.

import { eventData } from "./sse.js";

/** The gateway refused or failed a request. Has the gateway's message and the invalid field. */
export class ApiError extends Error {
  constructor(status, { message, param = null, type = null }) {
    super(message);
    this.status = status; // 0: the error arrived within the stream
    this.param = param;
    this.type = type;
  }
}

/** The gateway did not answer, or the connection was lost. */
export class ConnectionLost extends Error {}

/** Returns the served models. */
export async function listModels(apiKey) {
  const response = await send("v1/models", { headers: headersOf(apiKey), signal: AbortSignal.timeout(15_000) });
  return (await bodyOf(response)).data;
}

/** Returns the documents' scores, the highest first. Abort the signal to stop it. */
export async function rerank(body, apiKey, signal) {
  const headers = { "content-type": "application/json", ...headersOf(apiKey) };
  return bodyOf(await send("v1/rerank", { method: "POST", headers, body: JSON.stringify(body), signal }));
}

/** Yields the chunks of a chat's response. Abort the signal to stop it. */
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
    throw new ConnectionLost("The connection was lost; the answer is incomplete.", { cause: error });
  }
  if (!isComplete) throw new ConnectionLost("The stream ended before the answer was complete.");
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
