"""LoRA adapters in vLLM's engine: what it has room for, and what it has loaded."""

from __future__ import annotations

import itertools
import logging
import typing
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from tandem.engine.lora.adapter import CANNOT_LOAD
from tandem.protocol.messages.dispatch import AdapterRef
from tandem.protocol.prefix_hash import client_of
from tandem.runtime.errors import ConfigError, InvalidRequest, Overloaded, first_line
from tandem.runtime.files.lora_files import InvalidAdapter, Shape, read_adapter, read_unchanged_adapter
from tandem.vllm_worker.vllm_worker_config import VllmEngineConfig

log = logging.getLogger(__name__)

MAX_LOADED_ADAPTERS = 32
"""Adapters in memory. One more replaces the least recently used that no request has."""
MAX_CLIENT_ADAPTERS = MAX_LOADED_ADAPTERS * 3 // 4
"""Adapters of the requests of one client, if the API has keys."""
MAX_STEP_ADAPTERS = 4
"""Adapters in a step. vLLM reserves memory for each, of the largest rank."""


class Loras:
    """Loads adapters between steps and numbers them. An error of an adapter in a step would end the engine.

    vLLM keeps what is loaded (`max_cpu_loras`), so no step reads a folder, which may have changed or gone meanwhile.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._loaded: OrderedDict[str, LoRARequest] = OrderedDict()  # by digest, the least recently used first
        self._numbers = itertools.count(1)

    def request(self, adapter: AdapterRef | None, client: str, in_flight: Iterable[Request]) -> LoRARequest | None:
        """Returns what a request names, loaded; None for the base model. in_flight: requests that keep theirs.

        Raises InvalidRequest if it cannot be loaded, Overloaded if those in flight, or this client's, have too many
        others.
        """
        if adapter is None:
            return None
        used = {
            (client_of(each.cache_salt or ""), each.lora_request.lora_name) for each in in_flight if each.lora_request
        }
        own = {name for user, name in used if user == client}
        if client and adapter.digest not in own and len(own) >= MAX_CLIENT_ADAPTERS:
            raise Overloaded(
                f"your requests with {len(own)} LoRA adapters are in flight on this worker, which is the limit of one "
                "client; wait for one of them to end, or use fewer adapters at once"
            )
        if adapter.digest not in self._loaded:
            self._make_room({name for _, name in used})
            self._loaded[adapter.digest] = self._load(adapter)
        self._loaded.move_to_end(adapter.digest)
        return self._loaded[adapter.digest]

    def _make_room(self, used: Collection[str]) -> None:
        if len(self._loaded) < MAX_LOADED_ADAPTERS:
            return
        idle = next((digest for digest in self._loaded if digest not in used), None)
        if idle is None:
            raise Overloaded(f"requests with {MAX_LOADED_ADAPTERS} LoRA adapters are in flight on this worker")
        self._core.remove_lora(self._loaded.pop(idle).lora_int_id)

    def _load(self, adapter: AdapterRef) -> LoRARequest:
        lora_config = self._core.vllm_config.lora_config
        if lora_config is None:
            raise InvalidRequest("This worker takes LoRA adapters only if the cluster is started with one (--lora).")
        loaded = LoRARequest(adapter.digest, next(self._numbers), adapter.folder)
        try:
            files = read_unchanged_adapter(Path(adapter.folder), adapter.digest)
            if files.rank <= lora_config.max_lora_rank:
                self._core.add_lora(loaded)
                read_unchanged_adapter(Path(adapter.folder), adapter.digest)  # so vLLM has read what the request names
        except Exception as error:
            self._core.remove_lora(loaded.lora_int_id)
            log.error("cannot load the LoRA adapter in %s: %s", adapter.folder, first_line(error))
            raise InvalidRequest(CANNOT_LOAD, "model") from error
        try:
            files.check_rank(lora_config.max_lora_rank)
        except InvalidAdapter as error:
            raise InvalidRequest(error.message, "model") from error  # proxies know this code
        return loaded


def max_lora_rank(adapters: Sequence[AdapterRef], modules: Mapping[str, Shape]) -> int:
    """Returns the smallest rank that vLLM can be set to for these adapters, or 0 without any.

    modules: layers of the model. Raises ConfigError for an adapter that cannot be read, or does not fit the model.
    """
    ranks = []
    for ref in adapters:
        try:
            files = read_adapter(Path(ref.folder))
            files.check_fits(modules)
        except InvalidAdapter as error:
            raise ConfigError(f"--lora: {ref.folder}: {error.message}") from error
        ranks.append(files.rank)
    return min(each for each in typing.get_args(MaxLoRARanks) if each >= max(ranks)) if ranks else 0


def lora_modules(config: VllmEngineConfig) -> dict[str, Shape]:
    """Returns (inputs, outputs) of the model's linear layers by name, without loading the weights.

    There are none if it takes images.
    """
    hf_config = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    except ValueError:  # not a model of text only
        return {}
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }
