// Asks for an answer that a JSON schema describes; every answer that ends is such a document.
//
//   npm ci && node structured_output.mjs 127.0.0.1:8001
import { inferenceClient } from "./client.mjs";

const schema = {
  type: "object",
  properties: {
    hero: { type: "string", maxLength: 20 },
    age: { type: "integer", minimum: 1, maximum: 99 },
    friend: { enum: ["cat", "dog", "bird"] },
  },
  required: ["hero", "age", "friend"],
  additionalProperties: false,
};

const client = inferenceClient(process.argv[2] ?? "127.0.0.1:8001");
const call = client.Generate({
  chat: { messages: [{ role: "user", content: "Who is in the story?" }] },
  constraint: { json_schema: JSON.stringify(schema), no_whitespace: true },
  sampling: { temperature: 0 },
  stop: { max_tokens: 200 },
});
let text = "";
for await (const response of call) {
  text += response.text ?? "";
}
console.log(text);
client.close();
