// What Vercel's AI SDK reports of a running server, as one JSON document.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, scriptedUrl] = process.argv.slice(2);
const prompt = "Tell me a story about a dog and a river.";
const short = { prompt, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const hero = z.object({ name: z.enum(["Tom", "Mia"]), age: z.number().int().min(1).max(9) });

const openai = (base) => createOpenAI({ baseURL: `${base}/v1`, apiKey: "none" });
const providers = {
  compatible: (base) =>
    createOpenAICompatible({
      name: "baton",
      baseURL: `${base}/v1`,
      apiKey: "none",
      includeUsage: true,
      supportsStructuredOutputs: true,
    }).chatModel,
  chat: (base) => openai(base).chat,
  responses: (base) => openai(base).responses,
  messages: (base) => createAnthropic({ baseURL: `${base}/v1`, apiKey: "none" }),
};

async function streamed(model) {
  const pieces = [];
  const result = streamText({ ...short, model });
  for await (const piece of result.textStream) {
    pieces.push(piece);
  }
  return { pieces, outputTokens: (await result.usage).outputTokens, finishReason: await result.finishReason };
}

async function withTool(model) {
  const cities = [];
  const weather = tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      cities.push(city);
      return `sunny in ${city}`;
    },
  });
  const question = "What is the weather in Paris?";
  const settings = { model, prompt: question, maxRetries: 0, tools: { get_weather: weather }, stopWhen: stepCountIs(4) };
  const whole = await generateText(settings);
  const streamedText = await streamText(settings).text;
  return { cities, steps: whole.steps.length, text: whole.text, streamed: streamedText };
}

async function failure(model) {
  try {
    await generateText({ ...short, model });
  } catch (error) {
    return { isCall: APICallError.isInstance(error), status: error.statusCode, message: error.message };
  }
  return null;
}

const found = {};
for (const [kind, provider] of Object.entries(providers)) {
  const model = provider(url)(name);
  const whole = await generateText({ ...short, model });
  const parsed = await generateText({ ...short, model, maxOutputTokens: 200, output: Output.object({ schema: hero }) });
  found[kind] = {
    text: whole.text,
    finishReason: whole.finishReason,
    outputTokens: whole.usage.outputTokens,
    streamed: await streamed(model),
    parsed: parsed.output,
    tool: await withTool(provider(scriptedUrl)(name)),
    failure: await failure(provider(url)("no-such-model")),
  };
}
console.log(JSON.stringify(found));
