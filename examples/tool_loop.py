"""Lets the model call a function until it answers in words.

The first call is forced with `tool_choice="required"`, and its arguments follow the schema whatever the model is. The
built-in model is too small to decide about calls or to understand their results.
"""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")
WEATHER = {"Lisbon": "sunny, 24 degrees", "Oslo": "snow, -3 degrees"}
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": list(WEATHER)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Do I need a coat in Oslo?"}]
for round_number in range(4):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=TOOLS,
        tool_choice="required" if round_number == 0 else "auto",
        parallel_tool_calls=False,
        max_tokens=256,
        temperature=0,
    )
    message = answer.choices[0].message
    messages.append({"role": "assistant", "content": message.content, "tool_calls": message.tool_calls or []})
    if not message.tool_calls:
        print(f"answer: {message.content}")
        break
    for call in message.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        print(f"call: {call.function.name}({city}) -> {WEATHER[city]}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER[city]})
