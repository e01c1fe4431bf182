// Has a response made in the background, watches it, and goes on with its conversation. Both are kept.
//
//   npm ci && node responses.mjs 127.0.0.1:8001
import { inferenceClient } from "./client.mjs";

const client = inferenceClient(process.argv[2] ?? "127.0.0.1:8001");

const requestFor = (text) => ({
  input: [{ message: { role: "user", text } }],
  sampling: { temperature: 0 },
  stop: { max_tokens: 32 },
});

// The id of a response that is made whether or not anybody waits for it.
function begin(request) {
  const call = client.CreateResponse({ ...request, background: true });
  return new Promise((resolve, reject) => {
    call.once("data", ({ event }) => {
      call.cancel();
      resolve(event.response.id);
    });
    call.on("error", reject); // after the first event: that it was cancelled
  });
}

// Prints a response's text as it comes; its id.
async function print(call) {
  let id;
  for await (const { event } of call) {
    process.stdout.write(event.text?.text ?? "");
    id = event.response?.id ?? id;
  }
  console.log();
  return id;
}

const first = await begin(requestFor("Tell me a story about a dog and a river."));
await print(client.WatchResponse({ response_id: first }));
console.log(await print(client.CreateResponse({ ...requestFor("And then?"), previous_response_id: first })));
client.close();
