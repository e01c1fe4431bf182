// Streams a chat answer through the official openai client.
//
//   npm ci && node openai_chat.mjs http://127.0.0.1:8000 "Tell me a story about a dog and a river."
import OpenAI from "openai";

const [url = "http://127.0.0.1:8000", content = "Tell me a story about a dog and a river."] = process.argv.slice(2);

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const models = await client.models.list();
const stream = await client.chat.completions.create({
  model: models.data[0].id,
  messages: [{ role: "user", content }],
  temperature: 0,
  max_tokens: 64,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta.content ?? "");
  if (chunk.usage) {
    console.error(`\n${chunk.usage.completion_tokens} tokens`);
  }
}
