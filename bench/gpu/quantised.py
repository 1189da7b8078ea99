"""Decode and prefill steps of quantised models beside the same model in bfloat16, and their kernels for each layer.

    python -m bench.gpu.quantised [--device cpu] [--quick] [--json FILE]

Eight layers of the shape of Llama 3.1 8B (or a tiny model) with random weights. The aim for quantised weights is to be
faster than bfloat16: they are there to be read faster.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.gpu.engine import LLAMA_8B, TINY, decode_items, new_runner, prompt, seconds
from bench.gpu.part import Part
from bench.gpu.step_profile import profile_steps
from tandem.engine.batch import Batch
from tandem.engine.layers.fused_layer import FusedLayer
from tandem.engine.quantization.int4_linear import Int4Groups, Int4Linear

NUM_LAYERS = 8
GROUP_SIZE = 128
KINDS = ("auto", "fp8", "int8", "int4")


def to_int4(model: Any) -> None:
    """Replaces the decoder's linear layers by INT4 layers with random weights."""
    for parent in list(model.get_decoder().modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight = child.weight
                shape = weight.shape[0], weight.shape[1] // GROUP_SIZE
                values = torch.randint(0, 16, weight.shape, dtype=torch.uint8, device=weight.device)
                scales = torch.full(shape, 2e-3, dtype=torch.float32, device=weight.device)
                layer = Int4Linear.of(Int4Groups(values, scales, None, None), None, weight.dtype)
                setattr(parent, name, layer.requires_grad_(False))


def measure(part: Part, kind: str, shape: dict[str, Any], baseline: dict[str, float]) -> None:
    """Measures one kind of weights. baseline: the step times in bfloat16, written by the first kind.

    Of decode steps, the device's time: serving hides the host's behind the step before.
    """
    is_cuda = part.device == "cuda"
    runner = new_runner(
        shape, part.device, quantization="auto" if kind == "int4" else kind,
        change=to_int4 if kind == "int4" else None,
    )  # fmt: skip
    if is_cuda:  # on CPUs quantised layers are not
        assert all(isinstance(layer, FusedLayer) for layer in runner._model.base_model.layers), "some are not fused"
    repeat = 20 if is_cuda and not part.quick else 2
    steps = {f"decode of {size}": Batch(decode_items(size)) for size in ((1, 16, 64) if is_cuda else (1,))}
    steps |= {f"prefill of {length}": prompt(length) for length in ((2048,) if is_cuda else (64,))}
    name = "bfloat16" if kind == "auto" else kind
    for what, batch in steps.items():
        run = partial(runner.run, batch)
        step_ms = seconds(run, repeat, part.device) * 1e3
        found = profile_steps(run)
        if is_cuda and what.startswith("decode"):
            step_ms = found.device_ms  # the host needs longer for a step of eight layers than the device
        part.compare(f"{name}: {what}, ms", step_ms, baseline.setdefault(what, step_ms))
        part.add(f"{name}: {what}, kernels of a layer", found.num_kernels / shape["num_hidden_layers"])
        part.add(f"{name}: {what}, heaviest kernels", found.heaviest)


def main() -> None:
    part = Part("quantised", __doc__)
    shape = LLAMA_8B | {"num_hidden_layers": NUM_LAYERS} if part.device == "cuda" else TINY
    baseline: dict[str, float] = {}
    for kind in KINDS:
        with part.case(kind):
            measure(part, kind, shape, baseline)
        gc.collect()
        if part.device == "cuda":
            torch.cuda.empty_cache()
    part.end()


if __name__ == "__main__":
    main()
