"""Which layers of a model LoRA adapters may change."""

from __future__ import annotations

from torch import nn

from tandem.engine.quantization.linears import QuantizedLinear
from tandem.runtime.files.lora_files import Shape


def adaptable_layers(model: nn.Module) -> dict[str, Shape]:
    """Returns (inputs, outputs) of the layers that adapters may change, by name. Call before layers are fused.

    The head is left out, and so are layers of experts, which see some of the tokens.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, QuantizedLinear))
        and module is not head
        and ".experts." not in name
    }
