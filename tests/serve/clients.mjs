// Features of JavaScript clients against the server at argv[2]. Prints {client: {feature: result}}.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = process.argv[2] + "/v1";
const results = {};

async function run(client, features) {
  results[client] = {};
  for (const [name, feature] of Object.entries(features)) {
    try {
      results[client][name] = await feature();
    } catch (error) {
      results[client][name] = String(error);
    }
  }
}

async function joined(pieces) {
  let text = "";
  for await (const piece of pieces) text += piece;
  return text;
}

const add = tool({
  description: "The sum of two numbers",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => a + b,
});
const pet = Output.object({ schema: z.object({ legs: z.number().int() }) });

function sdkFeatures(model) {
  const asked = { model, prompt: "Hi", maxRetries: 0 };
  const withTools = { ...asked, tools: { add }, stopWhen: stepCountIs(3) };
  return {
    text: async () => (await generateText(asked)).text,
    stream: async () => joined(streamText(asked).textStream),
    tools: async () => (await generateText(withTools)).text,
    "streamed tools": async () => joined(streamText(withTools).textStream),
    required: async () =>
      (await generateText({ ...asked, tools: { add }, toolChoice: "required" })).toolCalls[0].input,
    object: async () => (await generateText({ ...asked, output: pet })).output,
  };
}

const openai = createOpenAI({ baseURL, apiKey: "none" });
const options = { name: "xlstm7b", baseURL, apiKey: "none", supportsStructuredOutputs: true };
await run("@ai-sdk/openai chat", sdkFeatures(openai.chat("tiny")));
await run("@ai-sdk/openai responses", sdkFeatures(openai.responses("tiny")));
await run("@ai-sdk/openai-compatible", sdkFeatures(createOpenAICompatible(options)("tiny")));

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const integer = { type: "integer" };
const parameters = {
  type: "object",
  properties: { a: integer, b: integer },
  required: ["a", "b"],
};
const sum = ({ a, b }) => a + b;
const functions = [
  { type: "function", function: { name: "add", parameters, function: sum, parse: JSON.parse } },
];
const chat = { model: "tiny", messages };
const responses = { model: "tiny", input: "Hi" };
await run("openai", {
  text: async () => (await client.chat.completions.create(chat)).choices[0].message.content,
  tools: async () =>
    client.chat.completions.runTools({ ...chat, tools: functions }).finalContent(),
  "streamed tools": async () =>
    client.chat.completions.runTools({ ...chat, tools: functions, stream: true }).finalContent(),
  responses: async () => (await client.responses.create(responses)).output_text,
  "streamed responses": async () =>
    (await client.responses.stream(responses).finalResponse()).output_text,
});
console.log(JSON.stringify(results));
