// Runs the openai and anthropic SDKs for JavaScript against URL and prints what they got as JSON.
// Usage: node clients.mjs URL KEY MODEL, in a folder whose node_modules have both.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, apiKey, model] = process.argv.slice(2);
const require = createRequire(pathToFileURL(process.cwd() + "/"));
const load = async (name) => (await import(pathToFileURL(require.resolve(name)).href)).default;
const [openaiModule, anthropicModule] = [await load("openai"), await load("@anthropic-ai/sdk")];
const OpenAI = openaiModule.OpenAI ?? openaiModule;
const Anthropic = anthropicModule.Anthropic ?? anthropicModule;
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story." }];
const schema = { type: "object", properties: { n: { type: "integer" } }, required: ["n"], additionalProperties: false };
const got = {};

const chat = { model, messages, temperature: 0, max_tokens: 16 };
got.chat = (await openai.chat.completions.create(chat)).choices[0].message.content;
got.chatStream = "";
for await (const chunk of await openai.chat.completions.create({ ...chat, stream: true })) {
  got.chatStream += chunk.choices[0]?.delta?.content ?? "";
}
got.models = (await openai.models.list()).data.map((each) => each.id);
got.embedding = (await openai.embeddings.create({ model, input: "a" })).data[0].embedding.length;
const tool = { type: "function", function: { name: "f", parameters: schema } };
const called = await openai.chat.completions.create({ ...chat, max_tokens: 64, tools: [tool], tool_choice: "required" });
got.call = JSON.parse(called.choices[0].message.tool_calls[0].function.arguments);

const message = { model, messages, max_tokens: 16, temperature: 0 };
got.message = (await anthropic.messages.create(message)).content[0].text;
got.messageStream = (await anthropic.messages.stream(message).finalMessage()).content[0].text;
got.count = (await anthropic.messages.countTokens({ model, messages })).input_tokens;
const use = await anthropic.messages
  .stream({ ...message, max_tokens: 64, tools: [{ name: "f", input_schema: schema }], tool_choice: { type: "any" } })
  .finalMessage();
got.use = use.content[0].input;
try {
  await anthropic.messages.create({ ...message, model: "claude" });
} catch (error) {
  got.error = [error.status, error.error.error.type];
}
console.log(JSON.stringify(got));
