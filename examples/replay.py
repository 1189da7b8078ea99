"""Records an answer under load while a worker is killed, then computes it again alone, bit for bit.

The cluster needs a second decode worker: `--decode 2`. Its own machine runs this program, which kills one of them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from openai import OpenAI

URL = os.environ.get("TANDEM_URL", "http://127.0.0.1:8000")
PORT = str(httpx.URL(URL).port)
TANDEM = [sys.executable, "-m", "tandem.deploy.cli"]

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
model = client.models.list().data[0].id
story = [{"role": "user", "content": "Tell me a story about a fox."}]


def load() -> None:
    """A stream of another client."""
    for _ in client.chat.completions.create(model=model, messages=story, stream=True, max_tokens=400):
        pass


def decode_workers() -> dict[str, int]:
    """Returns the process ids of the decode workers, by name."""
    told = subprocess.run([*TANDEM, "status", "--json", "--port", PORT], capture_output=True, text=True, check=True)
    workers = [report["worker"] for report in json.loads(told.stdout)[0]["workers"]]
    return {worker["worker_id"]: worker["pid"] for worker in workers if worker["role"] == "decode"}


pids = decode_workers()
others = [threading.Thread(target=load) for _ in range(6)]
for thread in others:
    thread.start()
# The first header asks for the record, and the answer says where it is. The second one asks who computes the answer.
headers = {"X-Tandem-Record": "1", "X-Tandem-Timeline": "1"}
with client.chat.completions.with_streaming_response.create(
    model=model, messages=story, stream=True, n=4, max_tokens=400, extra_headers=headers
) as answer:
    where = answer.headers["x-tandem-record"]
    decodes_at, num_events = "", 0
    for line in answer.iter_lines():
        if not decodes_at and (found := re.search(r'"decode":"([^"]+)"', line)):
            decodes_at = found[1]
        if line.startswith("data: "):
            num_events += 1
            if num_events == 100:
                os.kill(pids[decodes_at], signal.SIGKILL)  # its sequences migrate to the other decode worker
                print(f"killed {decodes_at}")
for thread in others:
    thread.join()

record = httpx.get(URL + where).raise_for_status().text
head, *sequences = map(json.loads, record.splitlines())
migrated = sum(len(sequence["computed_by"]) > 2 for sequence in sequences)
print(f"{migrated} of {len(sequences)} sequences migrated")
with TemporaryDirectory() as folder:
    file = Path(folder) / "record.jsonl"
    file.write_text(record)
    subprocess.run([*TANDEM, "replay", str(file)], check=True)
