"""Reads and checks LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors. Needs no torch.

An adapter is identified by a digest of both files. A worker that loads one compares the digest, so two workers never
compute one request with different weights.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files.model_json import decode_model_json
from tandem.runtime.files.regular_file import read_regular

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 4 << 30
MAX_HEADER_BYTES = 8 << 20
"""Size of the JSON that lists the tensors, about 50,000 of them. Decoding it holds the GIL for about 0.1 s."""
MAX_RANK = 512
_PREFIX = "base_model.model."
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "lora_bias": (False,),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "arrow_config": (),
    "kasa_config": (),
}
"""Fields of the configuration that change what is computed, and values with which they do not, besides null."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights whose adapters belong to a base model with other weights."""
_DTYPES = {"F64", "F32", "F16", "BF16"}

Shape = tuple[int, int]


class InvalidAdapter(InvalidRequest):
    """The adapter cannot be loaded, or does not fit the model."""

    code = "invalid_adapter"


@dataclass(frozen=True)
class AdapterFiles:
    """The contents of an adapter's files. modules: (inputs, outputs) of each linear layer that it changes, by name.

    scaling: factor of each layer's product B A.
    """

    digest: str
    rank: int
    scaling: float
    modules: dict[str, Shape]
    weights: bytes

    def check_fits(self, modules: Mapping[str, Shape]) -> None:
        """Raises InvalidAdapter unless the model has these layers. modules: the model's."""
        if not modules:
            raise InvalidAdapter(
                "These workers do not support LoRA adapters: it needs --tensor-parallel-size 1, a text-only model and, "
                "on GPUs, no --exact.",
                "lora_path",
            )
        for name, shape in self.modules.items():
            if name not in modules:
                raise InvalidAdapter(
                    f"The adapter changes {name}, which is no linear layer of the served model that adapters may "
                    "change; it may be for another base model.",
                    "lora_path",
                )
            if modules[name] != shape:
                ours, theirs = (f"{inputs} inputs and {outputs} outputs" for inputs, outputs in (modules[name], shape))
                raise InvalidAdapter(
                    f"The adapter is for another base model: its {name} has {theirs}, the served model's has {ours}.",
                    "lora_path",
                )

    def check_rank(self, max_rank: int) -> None:
        """Raises InvalidAdapter for a rank that the workers have no room for."""
        if self.rank > max_rank:
            raise InvalidAdapter(
                f"The adapter's rank is {self.rank}, but these workers take {max_rank} at most; start the cluster with "
                "an adapter of this rank in --lora.",
                "lora_path",
            )


def tensor_names(module: str) -> tuple[str, str]:
    """Returns the names of a layer's matrices A and B in the file."""
    return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def read_adapter(folder: Path) -> AdapterFiles:
    """Reads both files. Raises InvalidAdapter, which says what is missing or not supported."""
    if not folder.is_absolute():
        raise InvalidAdapter(f"{folder} is not an absolute path; give the whole path of the folder.", "lora_path")
    try:
        is_folder = folder.is_dir()
    except OSError as error:  # e.g. its name is too long
        raise InvalidAdapter(f"Cannot read {folder}: {error.strerror}.", "lora_path") from error
    if not is_folder:
        raise InvalidAdapter(f"There is no folder {folder}.", "lora_path")
    if not (folder / WEIGHTS_FILE).is_file() and (folder / "adapter_model.bin").is_file():
        raise InvalidAdapter(
            f"{folder} has adapter_model.bin, which may run code when it is loaded; "
            f"save the adapter as {WEIGHTS_FILE}.",
            "lora_path",
        )
    config_bytes = _read(folder / CONFIG_FILE, MAX_CONFIG_BYTES)
    weights = _read(folder / WEIGHTS_FILE, MAX_WEIGHTS_BYTES)
    rank, scaling = _read_config(folder / CONFIG_FILE, config_bytes)
    modules = _read_modules(folder / WEIGHTS_FILE, weights, rank)
    digest = sha256(sha256(config_bytes).digest() + sha256(weights).digest()).hexdigest()
    return AdapterFiles(digest, rank, scaling, modules, weights)


def read_unchanged_adapter(folder: Path, digest: str) -> AdapterFiles:
    """Raises InvalidAdapter if the files cannot be read, or have another digest now."""
    files = read_adapter(folder)
    if files.digest != digest:
        raise InvalidAdapter(
            f"The files in {folder} differ from those of the adapter that the request names; unload it and load it "
            "again."
        )
    return files


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        return read_regular(file, max_bytes)
    except OSError as error:
        raise InvalidAdapter(f"Cannot read {file}: {error.strerror}.", "lora_path") from error


def _read_config(file: Path, content: bytes) -> tuple[int, float]:
    """Returns rank and scaling."""
    try:
        config = decode_model_json(content)
    except ValueError as error:
        raise InvalidAdapter(f"{file} is not JSON: {error}.", "lora_path") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise InvalidAdapter(f"{file}: peft_type is {kind!r}; only 'LORA' is supported.", "lora_path")
    for field, neutral in _NEUTRAL_VALUES.items():
        value = config.get(field)
        if value is not None and value not in neutral:
            raise InvalidAdapter(f"{file}: {field} is {value!r}, which is not supported.", "lora_path")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_BASE):
        raise InvalidAdapter(
            f"{file}: init_lora_weights is {init!r}, which changes the base model's weights; convert the adapter to a "
            "plain one with path_initial_model_for_weight_conversion of PEFT.",
            "lora_path",
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise InvalidAdapter(f"{file}: r is {rank!r}, but must be a whole number from 1 to {MAX_RANK}.", "lora_path")
    if not isinstance(alpha, int | float) or not abs(alpha) <= sys.float_info.max:  # integers may be larger
        raise InvalidAdapter(f"{file}: lora_alpha is {alpha!r}, but must be a number.", "lora_path")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _read_modules(file: Path, content: bytes, rank: int) -> dict[str, Shape]:
    shapes = _tensor_shapes(file, content)
    modules: dict[str, Shape] = {}
    for name in shapes:
        module = name.removeprefix(_PREFIX).removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        if name not in tensor_names(module):
            raise InvalidAdapter(
                f"{file} has the tensor {name}, which is not supported; only lora_A.weight and lora_B.weight of "
                "linear layers are.",
                "lora_path",
            )
        first, second = (shapes.get(each) for each in tensor_names(module))
        if first is None or second is None:
            raise InvalidAdapter(f"{file} has only one of lora_A and lora_B of {module}.", "lora_path")
        if len(first) != 2 or len(second) != 2 or first[0] != rank or second[1] != rank:
            raise InvalidAdapter(
                f"{file}: lora_A and lora_B of {module} have the shapes {first} and {second}, but the rank is {rank}.",
                "lora_path",
            )
        modules[module] = first[1], second[0]
    if not modules:
        raise InvalidAdapter(f"{file} has no tensors.", "lora_path")
    return modules


def _tensor_shapes(file: Path, content: bytes) -> dict[str, list[int]]:
    """Reads the header of a safetensors file."""
    num_bytes = int.from_bytes(content[:8], "little")
    try:
        if len(content) < 8 or not 0 < num_bytes <= min(len(content) - 8, MAX_HEADER_BYTES):
            raise ValueError(f"a header of {num_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
        header = json.loads(content[8 : 8 + num_bytes])
        header.pop("__metadata__", None)
        unknown = {entry["dtype"] for entry in header.values()} - _DTYPES
        if unknown:
            raise InvalidAdapter(f"{file} has tensors of type {', '.join(sorted(unknown))}.", "lora_path")
        return {name: list(entry["shape"]) for name, entry in header.items()}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise InvalidAdapter(f"{file} is not a safetensors file: {error}.", "lora_path") from error
