"""Runs a cluster inside a Python program: starts it, asks it, and stops it."""

import os

from openai import OpenAI

from tandem.deploy.embedding import running_cluster

PORT = int(os.environ.get("TANDEM_PORT", "8000"))

with running_cluster(prefill=1, decode=1, port=PORT, admin_port=PORT + 1) as url:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model="tandem-demo", messages=[{"role": "user", "content": "What is 17 + 25?"}], temperature=0
    )
    print(answer.choices[0].message.content)
print("stopped")
