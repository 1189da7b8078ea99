"""Loads a checkpoint with transformers and checks that each tensor of the model came from its files.

Transformers fills tensors that the files lack with random numbers and only logs a table. A worker would then answer
nonsense, and each worker another.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from tandem.runtime.errors import ConfigError

log = logging.getLogger(__name__)

_NUM_NAMED = 3
"""Tensors that a message names; it counts the others."""

# Trainers save the tensors of a model that they wrap under its attribute in the wrapper.
_FRAMEWORKS = r"(?:(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.)"
_OWNERS = r"(?:base_model\.model|transformer|language_model|llm)\."
_INNER = {rf"\.{_FRAMEWORKS}+(?#{number})": "." for number in range(3)}  # each entry takes off one run of names
_RENAMINGS: tuple[dict[str, str], ...] = (
    {f"^{_FRAMEWORKS}+": "", **_INNER},
    {f"^{_FRAMEWORKS}*{_OWNERS}{_FRAMEWORKS}*": "", **_INNER},
    {f"^{_FRAMEWORKS}*model\\.{_FRAMEWORKS}*": "", **_INNER},
)
"""Renamings to try one by one where tensors are missing: patterns of wrappers' names, and what replaces them.

Names of owners are taken off once, because the model's own names may begin with them as well.
"""

_REPORT_LOGGER = logging.getLogger("transformers.modeling_utils")
_UNMERGED = re.compile(r"^(\S.*?)\s*\|[^|\w]*(?:\[\d+m)?CONVERSION", re.MULTILINE)


def load_checkpoint(auto_class: Any, model: str, model_config: Any, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the loaded model and transformers' account of it, which `check_tensors` checks.

    Where tensors are missing otherwise, prefixes of known wrappers, such as `module.`, are taken off the names in the
    files, and the model is loaded again. options: for the auto class's `from_pretrained`.
    """
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
    if head is None or not architectures or not all(name.endswith("Model") for name in architectures):
        return missing
    prefix = next(name for name, module in loaded.named_modules() if module is head)
    return missing - {f"{prefix}.{name}" for name, _ in head.named_parameters()}


@contextmanager
def _without_report(model: str) -> Iterator[None]:
    """Keeps transformers' table of missing tensors out of the log.

    Raises ConfigError with its names if transformers cannot merge tensors, such as experts of which one is missing.
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
