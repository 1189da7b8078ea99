"""Embeds prompts with vLLM and nothing of Tandem: `embeddings_of_vllm_alone.py MODEL PROMPTS FILE`.

PROMPTS: JSON file with lists of token ids. The answer has the vectors, and the seconds that all of them took after a
first call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from vllm import LLM


def main() -> None:
    model, prompts_file, answer_file = sys.argv[1:]
    prompts = [{"prompt_token_ids": each} for each in json.loads(Path(prompts_file).read_text())]
    llm = LLM(model, runner="pooling", dtype="float32", enforce_eager=True, kv_cache_memory_bytes=200 << 20)
    llm.embed(prompts[:1], use_tqdm=False)
    begun = time.monotonic()
    outputs = llm.embed(prompts, use_tqdm=False)
    seconds = time.monotonic() - begun
    vectors = [list(output.outputs.embedding) for output in outputs]
    Path(answer_file).write_text(json.dumps({"vectors": vectors, "seconds": seconds}))
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
