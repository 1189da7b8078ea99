"""Computes requests that a test has drawn, four at once: `python drawn_requests.py MODEL REQUESTS FILE`.

REQUESTS: file with a JSON list of StartPrefill. The answer has how each ended. Runs in vLLM's interpreter.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from engine_driver import EngineDriver  # type: ignore[import-not-found]

from tandem.protocol.messages.dispatch import StartPrefill


def main() -> None:
    model, requests_file, answer_file = sys.argv[1:]
    requests = msgspec.json.decode(Path(requests_file).read_bytes(), type=list[StartPrefill])
    driver = EngineDriver(model)
    endings = []
    for start in range(0, len(requests), 4):
        batch = requests[start : start + 4]
        print("computes", *batch, sep="\n", flush=True)  # seen if the engine ends
        ids = [driver.add_message(each) for each in batch]
        for each in ids:
            driver.result(each)
            endings.append([driver.endings[each], len(driver.outputs[each])])
    if not driver.all_free():
        endings.append(["blocks are kept", 0])
    Path(answer_file).write_text(json.dumps(endings))
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
