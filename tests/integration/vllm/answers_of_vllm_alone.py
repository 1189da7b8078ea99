"""Answers requests with vLLM and nothing of Tandem: `python answers_of_vllm_alone.py MODEL ADAPTER REQUESTS FILE`.

REQUESTS: JSON file with a list of {"prompt": ids, "sampling": fields, "uses_adapter": bool}. The answer has
the choices of each: {"token_ids", "text", "logprobs" of the sampled tokens or null}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams


def sampling(fields: dict[str, Any]) -> SamplingParams:
    given = dict(fields)
    if structure := given.pop("structured_outputs", None):
        given["structured_outputs"] = StructuredOutputsParams(**structure)
    return SamplingParams(**given)


def choices(output: Any) -> list[dict[str, Any]]:
    return [
        {
            "token_ids": list(each.token_ids),
            "text": each.text,
            "logprobs": each.logprobs
            and [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)],
        }
        for each in output.outputs
    ]


def main() -> None:
    model, adapter, requests_file, answer_file = sys.argv[1:]
    requests = json.loads(Path(requests_file).read_text())
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=100 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=8192,  # so that no prompt is computed in parts, where seeds end vLLM on CPUs
        enable_lora=True,
        generation_config="vllm",
        structured_outputs_config={"backend": "guidance"},
    )
    lora = LoRARequest("adapter", 1, adapter)
    outputs = llm.generate(
        [{"prompt_token_ids": each["prompt"]} for each in requests],
        [sampling(each["sampling"]) for each in requests],
        lora_request=[lora if each["uses_adapter"] else None for each in requests],
        use_tqdm=False,
    )
    Path(answer_file).write_text(json.dumps([choices(each) for each in outputs]))
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
