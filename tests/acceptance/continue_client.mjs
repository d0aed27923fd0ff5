// The client code of Continue (its package of adapters) with the fields that its chat sends by default. Prints the answer.
import { constructLlmApi } from "@continuedev/openai-adapters";

const [apiBase, apiKey, model] = process.argv.slice(2);
const api = constructLlmApi({ provider: "openai", apiBase, apiKey });
const body = {
  model,
  messages: [{ role: "system", content: "You are in chat mode." }, { role: "user", content: [{ type: "text", text: "What is 347 + 285?" }] }],
  max_tokens: 4096,
  temperature: 0,
  stream: true,
};
let answer = "";
for await (const chunk of api.chatCompletionStream(body, new AbortController().signal)) answer += chunk.choices[0]?.delta?.content ?? "";
console.log(answer.trim());
