"""Loads a LoRA adapter into the running cluster, and asks with and without it:

    python examples/lora_chat.py ./pirate

`tandem up --lora pirate=./pirate` loads it at the start instead.
"""

import os
import sys
from pathlib import Path

import httpx
from openai import OpenAI

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")
ADMIN_URL = os.environ.get("TANDEM_ADMIN_URL", "http://127.0.0.1:8001")

folder = Path(sys.argv[1]).absolute()
client = OpenAI(base_url=f"{URL}/v1", api_key="none")
model = client.models.list().data[0].id
loaded = httpx.post(
    f"{ADMIN_URL}/v1/load_lora_adapter", json={"lora_name": folder.name, "lora_path": str(folder)}, timeout=60
)
loaded.raise_for_status()
for name in (model, folder.name):
    answer = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "Hello!"}], max_tokens=32, temperature=0
    )
    print(f"{name}: {answer.choices[0].message.content}")
