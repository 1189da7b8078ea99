"""Loads a model with paged attention in its decoder, or raises a ConfigError that says what to change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, modeling_utils
from transformers.utils.logging import set_tqdm_hook

from tandem.engine.engine import ENGINE_NAME
from tandem.engine.engine_config import EngineConfig
from tandem.engine.exactness import exactness_problem
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.loading.checkpoint_tensors import check_tensors, load_checkpoint
from tandem.engine.loading.model_identity import dummy_identity, folder_identity, hub_identity
from tandem.engine.loading.model_probe import PROBE_NAME, UnsuitableModelError, check_config, probe_model, unsuitable
from tandem.engine.loading.rope import context_limit, fix_frequencies
from tandem.engine.loading.sharding import check_shards, placement_arguments, unwrap_linears
from tandem.engine.lora.layers import adaptable_layers
from tandem.engine.numerics import numerics_of
from tandem.engine.quantization.checkpoint import has_quantized_weights, load_quantized, quantization_of
from tandem.engine.quantization.online import quantize_linears
from tandem.engine.vision.models import Decoder, VisionTower, takes_media
from tandem.protocol.messages.numerics import Numerics
from tandem.protocol.messages.transfer import KVLayout
from tandem.runtime.errors import ConfigError, InternalError, first_line
from tandem.runtime.files.user_paths import is_readable_folder
from tandem.runtime.files.whole_file import write_whole

BLOCK_SIZE = 64
"""Tokens per KV block: enough for one copy per block, few enough for prefixes to be shared in steps of it."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(config: EngineConfig) -> LoadedModel:
    """Loads the model, or this rank's share of it.

    Raises ConfigError, and InternalError for what another try may not meet: a device without free memory, or a
    checkpoint that is replaced meanwhile.
    """
    device = _resolve_device(config)
    model_config, text_config = check_model(config)
    max_model_len = _resolve_max_model_len(config, text_config)
    dtype = _DTYPES.get(config.dtype) or getattr(text_config, "dtype", None) or torch.float32
    kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype
    auto_class: Any = AutoModelForCausalLM
    attention: Any = PROBE_NAME
    if takes_media(model_config):
        auto_class = AutoModelForImageTextToText
        attention = {"text_config": PROBE_NAME, "vision_config": "sdpa"}
    options = {"attn_implementation": attention, "trust_remote_code": config.trust_remote_code}
    stored = quantization_of(config.model, model_config)
    is_online = config.quantization != "auto"
    has_head = True
    try:
        model_id = _model_id(config, model_config, device)
        if config.load_format == "dummy":
            model = make_dummy_model(auto_class, model_config, dtype, device, **options)
        else:
            # Each layer goes to the GPU when it has been quantised, which needs no room there for all of the original.
            first_device = torch.device("cpu") if is_online else device
            options |= placement_arguments(config.tensor_parallel_size, first_device) | {"dtype": dtype}
            with report_progress(config.progress_file), no_allocator_warmup():
                if stored is None:
                    model, info = load_checkpoint(auto_class, config.model, model_config, **options)
                    has_head = check_tensors(config.model, model, info)
                else:
                    model, has_head = load_quantized(
                        auto_class, config.model, model_config, stored, device, config.tensor_parallel_size, **options
                    )
        is_unchanged = _model_id(config, model_config, device) == model_id
    except ConfigError:
        raise
    except (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError) as error:
        # Another process may still have the device, such as the worker that this one replaces.
        raise InternalError(f"{config.model} could not be loaded: {first_line(error)}") from error
    except Exception as error:
        # A broken checkpoint may fail in any of several libraries.
        raise ConfigError(f"the weights of {config.model} cannot be loaded: {first_line(error)}") from error
    if not is_unchanged:
        raise InternalError(f"the files of {config.model} changed while they were loaded; the worker must start again")
    unwrap_linears(model)
    if is_online:
        quantize_linears(config.model, model, config.quantization, device)
    model = model.to(device).eval().requires_grad_(False)
    vision = None
    if takes_media(model_config):
        vision, model = VisionTower(model, config.exact), Decoder(model)
    rope_length = max_model_len if fix_frequencies(model, max_model_len) else 0
    try:
        probed = probe_model(model, max_model_len)
    except UnsuitableModelError as error:
        raise unsuitable(config.model, model_config, str(error)) from error
    layout = KVLayout(
        model_id=model_id if kv_dtype == dtype else f"{model_id}+{_name(dtype)} as {_name(kv_dtype)}",
        dtype=_name(kv_dtype),
        num_layers=probed.num_layers,
        num_kv_heads=probed.num_kv_heads,  # of this rank
        head_dim=probed.head_dim,
        block_size=config.block_size or BLOCK_SIZE,
        tensor_parallel_size=config.tensor_parallel_size,
        engine=ENGINE_NAME,
    )
    lora_modules = adaptable_layers(model) if takes_adapters(config, device, vision is not None) else {}
    quantization = f"{config.quantization} W8A8, quantised when loaded" if is_online else stored.label if stored else ""
    loaded = LoadedModel(
        model,
        max_model_len,
        text_config.vocab_size,
        dtype,
        device,
        layout,
        vision,
        quantization,
        lora_modules,
        rope_length,
        config.exact,
        has_head,
    )
    return replace(loaded, layout=msgspec.structs.replace(layout, numerics=_numerics(config, loaded)))


def _numerics(config: EngineConfig, loaded: LoadedModel) -> Numerics:
    """Raises ConfigError if answers must be exact but would not be."""
    problem = exactness_problem(config, loaded)
    if config.exact and problem:
        raise ConfigError(f"--exact: answers of {config.model} would not be exact: {problem}; leave out --exact")
    return numerics_of(config, loaded, problem)


def takes_adapters(config: EngineConfig, device: torch.device, has_vision: bool) -> bool:
    """Whether the layers of a model may be changed by LoRA adapters.

    An adapter's products on a GPU have as many rows as the step has with it, for which they are not made exact.
    """
    return not has_vision and config.tensor_parallel_size == 1 and not (config.exact and device.type == "cuda")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_model(config: EngineConfig) -> tuple[Any, Any]:
    """Returns the model's config and its decoder's config. Raises ConfigError if the model cannot be served."""
    model_config = _load_config(config)
    text_config = model_config.get_text_config(decoder=True)
    check_config(config.model, model_config, text_config)
    if config.load_format == "dummy" and config.tensor_parallel_size > 1:
        raise ConfigError("--load-format dummy does not support tensor parallelism; use --tensor-parallel-size 1")
    if takes_media(model_config) and config.tensor_parallel_size > 1:
        raise ConfigError(f"{config.model} is a vision model: use --tensor-parallel-size 1")
    check_shards(config.model, text_config, config.tensor_parallel_size)
    _check_quantization(config, model_config)
    return model_config, text_config


def _check_quantization(config: EngineConfig, model_config: Any) -> None:
    """Raises ConfigError if the checkpoint's quantisation cannot be served, or not with these settings."""
    stored = quantization_of(config.model, model_config)
    if stored is not None and config.load_format == "dummy":
        raise ConfigError(
            f"{config.model} has quantised weights, which --load-format dummy does not create; leave it out"
        )
    if config.quantization != "auto" and has_quantized_weights(model_config):
        raise ConfigError(
            f"{config.model} has quantised weights already; leave out --quantization {config.quantization}"
        )


def _resolve_device(config: EngineConfig) -> torch.device:
    if config.tensor_parallel_size > 1 and config.device != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.distributed.get_rank())
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is visible; use --device cpu, or check the driver with nvidia-smi")
    return torch.device(config.device)


def _load_config(config: EngineConfig) -> Any:
    folder = Path(config.model)
    looks_like_path = config.model.startswith((".", "/", "~")) or config.model.count("/") != 1
    is_folder = is_readable_folder(folder)
    if is_folder:
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{config.model} has no config.json; --model must be a folder in Hugging Face format")
    elif looks_like_path:
        raise ConfigError(f"the model folder {config.model} does not exist; check --model")
    try:
        return AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except Exception as error:
        if is_folder:
            raise ConfigError(f"the config of {config.model} cannot be used: {first_line(error)}") from error
        raise ConfigError(
            f"{config.model} is not a local folder and could not be fetched from the hub: {first_line(error)}"
        ) from error


def _resolve_max_model_len(config: EngineConfig, text_config: Any) -> int:
    limit = context_limit(text_config)
    if config.max_model_len and limit and config.max_model_len > limit:
        raise ConfigError(f"--max-model-len {config.max_model_len} exceeds the model's limit of {limit}")
    if not (config.max_model_len or limit):
        raise ConfigError(f"{config.model} does not specify a maximum sequence length; set --max-model-len")
    return config.max_model_len or limit


def _model_id(config: EngineConfig, model_config: Any, device: torch.device) -> str:
    """Returns the identity of the weights. Raises ConfigError for a hub model of an unknown commit, and what
    `folder_identity` raises."""
    folder = Path(config.model)
    is_dummy = config.load_format == "dummy"
    is_online = config.quantization != "auto"
    if folder.is_dir():
        checkpoint = folder_identity(folder, with_weights=not is_dummy, with_code=config.trust_remote_code)
    elif commit := getattr(model_config, "_commit_hash", None):
        checkpoint = hub_identity(config.model, commit)
    else:
        raise ConfigError(
            f"the hub's cache does not tell which commit of {config.model} it holds, so workers could have different "
            "weights; download the model into a folder and give that as --model"
        )
    identity = dummy_identity(checkpoint, dummy_recipe(device)) if is_dummy else checkpoint
    return f"{identity}+{config.quantization}" if is_online else identity


_SEED = 0


def make_dummy_model(auto_class: Any, config: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """Initialises the model directly on the device in `dtype`. options: for the auto class's `from_config`.

    The weights are the same in every process on the same kind of device, as prefill and decode require.
    """
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=dtype, **options)
    model = model.to_empty(device=device)
    model.tie_weights()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(_SEED)
        model.initialize_weights()  # including buffers, such as rotary frequencies
    return model


def dummy_recipe(device: torch.device) -> str:
    """All that the random weights depend on besides the config, as part of the model's identity."""
    return f"seed {_SEED}, torch {torch.__version__}, {device.type}"


@contextmanager
def no_allocator_warmup() -> Iterator[None]:
    """Keeps transformers from reserving the memory of all weights in one piece before it loads them.

    That saves a few hundred calls of cudaMalloc. But holes in such a piece stay reserved, and each merged weight
    (`engine.layers.fusing`) leaves holes that the next one does not fit into: 15 % of Llama-3.1-8B.
    """

    def skip(*_: Any) -> None:
        pass

    name = "caching_allocator_warmup"
    original = getattr(modeling_utils, name)
    setattr(modeling_utils, name, skip)
    try:
        yield
    finally:
        setattr(modeling_utils, name, original)


_PERIOD_S = 0.1


class _ReportingBar:
    """Wraps a tqdm bar and writes the fraction that has been consumed to a file."""

    def __init__(self, bar: Any, file: Path, total: int) -> None:
        self._bar = bar
        self._file = file
        self._total = total
        self._next_write = 0.0

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._bar):
            if time.monotonic() >= self._next_write:
                write_whole(self._file, f"{number / self._total:.3f}")
                self._next_write = time.monotonic() + _PERIOD_S
            yield item
        write_whole(self._file, "1")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


@contextlib.contextmanager
def report_progress(file: str) -> Iterator[None]:
    """Writes the progress of transformers' weight loading to `file`, from 0 to 1. Does nothing if `file` is empty."""
    if not file:
        yield
        return

    def make(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bar = factory(*args, **kwargs)
        total = getattr(bar, "total", None)
        return _ReportingBar(bar, Path(file), total) if kwargs.get("desc") == "Loading weights" and total else bar

    previous = set_tqdm_hook(make)
    try:
        yield
    finally:
        set_tqdm_hook(previous)
