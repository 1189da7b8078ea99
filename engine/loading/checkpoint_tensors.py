"""Loads a checkpoint with transformers and checks that each tensor of the model came from its files.

Transformers fills tensors that the files lack with random numbers and only logs a table. A worker would then answer
nonsense, and each worker another.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import nn

from tandem.runtime.errors import ConfigError, first_line
from tandem.runtime.files.model_json import read_model_json

log = logging.getLogger(__name__)

_LFS_POINTER = b"version https://git-lfs"
_NUM_NAMED = 3
"""Tensors that a message names; it counts the others."""

# Trainers save the tensors of a model that they wrap under its attribute in the wrapper.
_FRAMEWORKS = r"(?:(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.)"
_OWNERS = r"(?:base_model\.model|pretrained_model|transformer|(?:model\.)?language_model|llm)\."
_INNER = {rf"\.{_FRAMEWORKS}+(?#{number})": "." for number in range(3)}  # each entry takes off one run of names
_RENAMINGS: tuple[dict[str, str], ...] = (
    {f"^{_FRAMEWORKS}+": "", **_INNER},
    {f"^{_FRAMEWORKS}*{_OWNERS}{_FRAMEWORKS}*": "", **_INNER},
    {f"^{_FRAMEWORKS}*model\\.{_FRAMEWORKS}*": "", **_INNER},
)
"""Renamings to try one by one where tensors are missing: patterns of wrappers' names, and what replaces them.

Names of owners are taken off once, because the model's own names may begin with them as well.
"""

_BASE_MODEL = re.compile(r"(?<!Head)(?<!Heads)Model$")
"""Name of an architecture without an output head; GPT2LMHeadModel has one."""

_REPORT_LOGGER = logging.getLogger("transformers.modeling_utils")
_UNMERGED = re.compile(r"^(\S.*?)\s*\|[^|\w]*(?:\[\d+m)?CONVERSION", re.MULTILINE)


def load_checkpoint(auto_class: Any, model: str, model_config: Any, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the loaded model and transformers' account of it, which `check_tensors` checks.

    Where tensors are missing otherwise, prefixes of known wrappers, such as `module.`, are taken off the names in the
    files, and the model is loaded again. options: for the auto class's `from_pretrained`. Raises ConfigError for files
    that are not there or cannot be read, and what transformers raises.
    """
    _check_index(Path(model))
    options |= {"config": model_config, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with _without_report(model):
        loaded, info = auto_class.from_pretrained(model, **options)
        for renaming in _RENAMINGS:
            found = {key for key in info["unexpected_keys"] if any(re.search(pattern, key) for pattern in renaming)}
            if not found or not (lacking := _lacking(loaded, info)):
                continue
            del loaded  # its memory is needed for the next
            loaded, renamed = auto_class.from_pretrained(model, key_mapping=renaming, **options)
            if len(still := _lacking(loaded, renamed)) < len(lacking):
                info = renamed
            if not still:
                log.info("wrappers' names are taken off %d tensors, such as %s", len(found), min(found))
    return loaded, info


class _Index(msgspec.Struct):
    """Index of weights in several files. Transformers requires both fields."""

    metadata: dict[str, Any]
    weight_map: dict[str, str]
    """Names of files, by tensor."""


def _check_index(folder: Path) -> None:
    """Raises ConfigError if the index that transformers will read is broken, or names files that are not there."""
    for weights in ("model.safetensors", "pytorch_model.bin"):
        if (folder / weights).exists():
            return
        if (index := read_model_json(file := folder / f"{weights}.index.json", _Index)) is not None:
            names = sorted(set(index.weight_map.values()))
            if not names:
                raise ConfigError(f"{file} names no tensors; download the model again")
            if lacking := [name for name in names if not (folder / name).is_file()]:
                raise ConfigError(
                    f"{folder} lacks {len(lacking)} of the {len(names)} files that {file.name} names: {_named(lacking)}"
                )
            return


def _unreadable(folder: Path, error: SafetensorError) -> ConfigError:
    """Returns the error for a broken file of tensors, which the library does not name."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                continue
        except (SafetensorError, OSError) as broken:
            with file.open("rb") as opened:
                is_pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
            reason = "it is only a pointer of Git LFS; run git lfs pull" if is_pointer else first_line(broken)
            return ConfigError(f"cannot read {file}: {reason}")
    return ConfigError(f"the weights of {folder} cannot be loaded: {first_line(error)}")


def check_tensors(model: str, loaded: Any, info: Mapping[str, Any]) -> bool:
    """Returns whether the model has an output head, without which it serves embeddings only.

    Raises ConfigError if other tensors are missing, or if some have another shape. Logs those that it does not use.
    model: its name. loaded, info: of `load_checkpoint`.
    """
    order = {name: number for number, name in enumerate(loaded.state_dict())}
    missing = sorted(_lacking(loaded, info), key=lambda name: (order.get(name, len(order)), name))
    surplus = sorted(info["unexpected_keys"])
    if missing:
        others = f"; they have {len(surplus)} that the model does not: {_named(surplus)}" if surplus else ""
        raise ConfigError(
            f"{model} cannot be served: its files lack {len(missing)} of the model's {len(order)} tensors: "
            f"{_named(missing)}{others}"
        )
    if mismatched := sorted(info["mismatched_keys"], key=lambda found: (order.get(found[0], len(order)), found[0])):
        shown = [f"{name} is {[*found]}, not {[*wanted]}" for name, found, wanted in mismatched]
        raise ConfigError(
            f"{model} cannot be served: {len(mismatched)} tensors in its files have other shapes than its config.json "
            f"implies: {_named(shown)}"
        )
    has_head = not info["missing_keys"]
    if not has_head:
        log.warning("%s is a base model without an output head: it serves embeddings only", model)
    if surplus:
        log.warning("%s has %d tensors that the model does not use: %s", model, len(surplus), _named(surplus))
    return has_head


def _named(names: list[str]) -> str:
    rest = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + rest


def _lacking(loaded: Any, info: Mapping[str, Any]) -> set[str]:
    """Returns the missing tensors, without the output head of a base model: one for embeddings needs none."""
    missing: set[str] = set(info["missing_keys"])
    architectures = getattr(loaded.config, "architectures", None) or []
    head: nn.Module | None = loaded.get_output_embeddings()
    is_base = all(_BASE_MODEL.search(name) for name in architectures)
    if head is None or not architectures or not is_base:
        return missing
    prefix = next(name for name, module in loaded.named_modules() if module is head)
    return missing - {f"{prefix}.{name}" for name, _ in head.named_parameters()}


@contextmanager
def _without_report(model: str) -> Iterator[None]:
    """Keeps transformers' table of missing tensors out of the log.

    Raises ConfigError with its names if transformers cannot merge tensors, such as experts of which one is missing, and
    for a broken file.
    """
    reports: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "LOAD REPORT" in message:
            reports.append(message)
            return False
        return "absent from the checkpoint" not in message  # of tied weights, which are among the missing tensors

    _REPORT_LOGGER.addFilter(keep)
    try:
        yield
    except SafetensorError as error:
        raise _unreadable(Path(model), error) from error
    except RuntimeError as error:
        unmerged = _UNMERGED.findall(reports[-1]) if reports else []
        if not unmerged:
            raise
        raise ConfigError(
            f"{model} cannot be served: its files lack some of the tensors that are merged into {_named(unmerged)}, or "
            "these do not fit together"
        ) from error
    finally:
        _REPORT_LOGGER.removeFilter(keep)
