"""Answers requests with vLLM and nothing of Tandem: `answers_of_vllm_alone.py MODEL RANKS ADAPTER REQUESTS FILE`.

RANKS: tensor parallel size. ADAPTER: folder, or empty. REQUESTS: JSON file with a list of {"prompt": ids, "sampling":
fields, "uses_adapter": bool}. The answer has the choices of each: {"token_ids", "logprobs" of the sampled tokens or
null}.
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
    if bias := given.pop("logit_bias", None):
        given["logit_bias"] = {int(token): value for token, value in bias.items()}  # JSON has only texts as keys
    return SamplingParams(**given)


def choices(output: Any) -> list[dict[str, Any]]:
    return [
        {
            "token_ids": list(each.token_ids),
            "logprobs": each.logprobs
            and [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)],
        }
        for each in output.outputs
    ]


def remove_shared_memory(worker: Any) -> None:
    """Removes the names of what the ranks have mapped: vLLM leaves them behind on CPUs."""
    for file in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
        file.unlink(missing_ok=True)


def main() -> None:
    model, num_ranks, adapter, requests_file, answer_file = sys.argv[1:]
    requests = json.loads(Path(requests_file).read_text())
    llm = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        kv_cache_memory_bytes=400 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=8192,  # so that no prompt is computed in parts, where seeds end vLLM on CPUs
        enable_lora=bool(adapter),
        tensor_parallel_size=int(num_ranks),
        generation_config="vllm",
        structured_outputs_config={"backend": "guidance"},
    )
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    answers: dict[int, Any] = {}
    for uses_adapter in (False, True):  # apart: in a mixed batch, vLLM 0.32 computes wrong tokens on CPUs
        numbers = [number for number, each in enumerate(requests) if each["uses_adapter"] == uses_adapter]
        if not numbers:
            continue
        outputs = llm.generate(
            [{"prompt_token_ids": requests[number]["prompt"]} for number in numbers],
            [sampling(requests[number]["sampling"]) for number in numbers],
            lora_request=lora if uses_adapter else None,
            use_tqdm=False,
        )
        answers |= {number: choices(output) for number, output in zip(numbers, outputs, strict=True)}
    answer = [answers[number] for number in range(len(requests))]
    Path(answer_file).write_text(json.dumps(answer))
    if num_ranks != "1":
        llm.collective_rpc(remove_shared_memory)
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
