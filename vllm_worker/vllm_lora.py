"""LoRA adapters as vLLM takes them: with a number of its own for each."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.lora.request import LoRARequest

from tandem.protocol.messages.adapter import AdapterRef
from tandem.vllm_worker.vllm_worker_config import VllmEngineConfig


class Loras:
    """Numbers adapters by their digests."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def request(self, adapter: AdapterRef | None) -> LoRARequest | None:
        """Returns what a request names; None for the base model."""
        if adapter is None:
            return None
        number = self._numbers.setdefault(adapter.digest, len(self._numbers) + 1)
        return LoRARequest(adapter.digest, number, adapter.folder)


def lora_modules(config: VllmEngineConfig) -> dict[str, tuple[int, int]]:
    """Returns (inputs, outputs) of the model's linear layers by name, without loading the weights."""
    hf_config = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }
