"""Streams a chat with OpenAI's client."""

import os

from openai import OpenAI

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=48, temperature=0, stream=True
)
print(f"{model}: ", end="")
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
