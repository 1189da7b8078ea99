"""Runs a file of requests as a batch, and prints the answers. The cluster needs `--data-dir FOLDER`."""

import json
import os
import time

from openai import OpenAI

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
model = client.models.list().data[0].id
lines = [
    {
        "custom_id": f"sum-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": model,
            "messages": [{"role": "user", "content": f"What is {number} + {number}?"}],
            "max_tokens": 16,
            "temperature": 0,
        },
    }
    for number in range(10, 20)
]
data = "\n".join(map(json.dumps, lines)).encode()
file = client.files.create(file=("requests.jsonl", data), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status)
assert batch.output_file_id is not None, batch.errors
for line in sorted(client.files.content(batch.output_file_id).text.splitlines()):
    answer = json.loads(line)
    print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
