"""Torch operators of the namespace `tandem`, which launch kernels.

As operators, kernels can be recorded in graphs, and steps traced without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library: Any = torch.library.Library("tandem", "FRAGMENT")  # type: ignore[no-untyped-call]


def register(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Adds an operator. schema: in torch's language. fake: returns what `function` returns, without the content."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CUDA", "CPU"):  # on a CPU the kernels run where Triton interprets them
        _library.impl(name, function, device)
    torch.library.register_fake(f"tandem::{name}", fake, lib=_library)
