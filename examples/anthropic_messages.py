"""Asks through Anthropic's Messages API, with a system prompt, and goes on with a second question."""

import os

from anthropic import Anthropic
from anthropic.types import MessageParam

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")

client = Anthropic(base_url=URL, api_key="none")
model = client.models.list().data[0].id
chat: list[MessageParam] = []
for question in ("How are you?", "What is 17 + 25?"):
    chat.append({"role": "user", "content": question})
    answer = client.messages.create(
        model=model, system="Be grumpy.", messages=chat, max_tokens=48, extra_body={"temperature": 0}
    )
    chat.append({"role": "assistant", "content": answer.content})
    print(f"{question} {answer.content[0].text} ({answer.usage.output_tokens} tokens)")
