// What the official openai client for Node reports of a running server, as one JSON document.
import OpenAI from "openai";

const [url, model] = process.argv.slice(1);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story about a dog and a river." }];
const chat = { model, messages, temperature: 0, max_tokens: 24 };
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters, strict: true } }];
const schema = { ...parameters, properties: { city: { enum: ["Oslo"] } } };

async function errorOf(promise) {
  try {
    await promise;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, param: error.param };
  }
  return null;
}

const found = { models: [] };
for await (const one of client.models.list()) {
  found.models.push(one.id);
}
found.whole = await client.chat.completions.create(chat);

found.pieces = [];
const stream = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) {
  found.pieces.push(chunk.choices[0]?.delta.content ?? "");
  found.streamUsage = chunk.usage ?? null;
}
found.helper = await client.chat.completions.stream(chat).finalContent();
found.completion = await client.completions.create({ model, prompt: "Once", max_tokens: 4, n: 2, seed: 1 });
found.call = await client.chat.completions.create({ ...chat, tools, tool_choice: "required", max_tokens: 100 });
found.streamedCall = await client.chat.completions
  .stream({ ...chat, tools, tool_choice: "required", max_tokens: 100 })
  .finalMessage();
const response_format = { type: "json_schema", json_schema: { name: "place", strict: true, schema } };
found.parsed = (await client.chat.completions.parse({ ...chat, response_format })).choices[0].message.parsed;

const response = { model, input: messages[0].content, temperature: 0, max_output_tokens: 24 };
found.response = await client.responses.create(response);
found.retrieved = (await client.responses.retrieve(found.response.id)).output_text;
found.events = [];
for await (const event of await client.responses.create({ ...response, stream: true })) {
  found.events.push(event.type);
}

found.wrongModel = await errorOf(client.chat.completions.create({ ...chat, model: "gpt-17" }));
found.wrongField = await errorOf(client.chat.completions.create({ ...chat, top_p: 7 }));
console.log(JSON.stringify(found));
