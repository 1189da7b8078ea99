"""A model that has been loaded, as the other parts of a worker see it. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tandem.protocol.messages.transfer import KVLayout

if TYPE_CHECKING:
    import torch

    from tandem.engine.vision.models import VisionTower


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run."""

    model: Any
    """The decoder with its head."""
    max_model_len: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    layout: KVLayout
    vision: VisionTower | None = None
    """None for text-only models."""
    quantization: str = ""
    """Quantisation of the weights, for people; empty for none."""
    lora_modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(inputs, outputs) of the linear layers that LoRA adapters may change, by name; empty if it takes none."""
    rope_length: int = 0
    """Limit on a sequence's length if RoPE's frequencies depend on it, else 0."""
    has_head: bool = True
    """False for a checkpoint that is for embeddings only: its logits are random."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """The KV cache's."""
        import torch

        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return dtype
