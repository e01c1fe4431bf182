// Streams a chat answer over Baton's gRPC API.
//
//   npm ci && node chat.mjs 127.0.0.1:8001 "Tell me a story about a dog and a river."
import { status } from "@grpc/grpc-js";
import { inferenceClient } from "./client.mjs";

const [address = "127.0.0.1:8001", content = "Tell me a story about a dog and a river."] = process.argv.slice(2);

const client = inferenceClient(address);
const call = client.Generate({
  chat: { messages: [{ role: "user", content }] },
  sampling: { temperature: 0 },
  stop: { max_tokens: 64 },
});
call.on("data", (response) => {
  process.stdout.write(response.text ?? "");
  if (response.usage) {
    console.error(`\n${response.usage.completion_tokens} tokens`);
  }
});
call.on("error", (error) => {
  console.error(`${status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("end", () => client.close());
