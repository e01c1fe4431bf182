// Has the model call a function, calls it, and prints what the model says to the result.
//
//   npm ci && node tools.mjs 127.0.0.1:8001
import { inferenceClient } from "./client.mjs";

const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [
  { name: "get_weather", description: "The weather of the next days.", parameters_schema: JSON.stringify(parameters) },
];
const functions = { get_weather: ({ city, days }) => `${days} sunny days in ${city}` };

const client = inferenceClient(process.argv[2] ?? "127.0.0.1:8001");

// The assistant's message, put together from its pieces.
async function ask(messages, tool_choice) {
  const request = { chat: { messages, tools, tool_choice }, sampling: { temperature: 0 }, stop: { max_tokens: 100 } };
  const answer = { role: "assistant", content: "", tool_calls: [] };
  for await (const response of client.Generate(request)) {
    answer.content += response.text ?? "";
    for (const { index = 0, id, name, arguments: piece = "" } of response.tool_calls ?? []) {
      answer.tool_calls[index] ??= { id, name, arguments: "" };
      answer.tool_calls[index].arguments += piece;
    }
  }
  return answer;
}

const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const { tool_calls, ...answer } = await ask(messages, { function_name: "get_weather" });
messages.push({ ...answer, tool_calls });
for (const call of tool_calls) {
  const content = functions[call.name](JSON.parse(call.arguments));
  console.log(`${call.name}${call.arguments} = ${content}`);
  messages.push({ role: "tool", tool_call_id: call.id, content });
}
console.log((await ask(messages, { mode: "TOOL_MODE_NONE" })).content);
client.close();
