"""What decides the bits of log-probabilities beside the tokens, the weights, the adapter and the media.

Two workers of equal numerics compute the same bits, if neither has a problem (docs/exactness.md). Every field is part
of the digest except the text of the problem.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b

import msgspec

GPU_INSTRUCTION_SET = "compute capability"
"""Begins the `instruction_set` of workers on GPUs."""


class Numerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The arithmetic of one worker. Values are for people, too: messages about two workers name a field and both."""

    engine: str = ""
    """Name and version."""
    libraries: str = ""
    """Names and versions of those that compute."""
    device: str = ""
    """Model of the CPU or GPU, on which libraries choose their kernels."""
    instruction_set: str = ""
    """Instruction sets that the libraries may use, or a GPU's compute capability."""
    environment: str = ""
    """Environment variables that change the arithmetic, with their values."""
    dtype: str = ""
    """Of the weights and activations, as torch names it."""
    kv_dtype: str = ""
    """Of the KV cache, as torch names it."""
    quantization: str = ""
    """Quantisation of the weights; empty for none."""
    kernels: str = ""
    """Name of the engine's own arithmetic, which changes whenever that does, and its tiles."""
    max_model_len: int = 0
    """Limit on a sequence's length if RoPE's frequencies depend on it, else 0."""
    num_threads: int = 0
    """CPU threads of a rank, among which sums may be split; 0 if they do not compute."""
    num_ranks: int = 1
    """Ranks over which sums are split."""
    probe: str = ""
    """Hash of fixed computations. It differs where libraries compute otherwise for a reason that no field names."""
    problem: str = ""
    """Why log-probabilities depend on more than these fields, such as the batch, as one sentence; empty if they do
    not."""

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits for all fields; of the problem only whether there is one."""
        values = (*(getattr(self, field) for field in _COMPARED), bool(self.problem))
        return blake2b(msgspec.msgpack.encode(values), digest_size=8, person=b"tandem-numerics").hexdigest()

    def described(self) -> str:
        """Returns what they say of answers: "exact", or why not, and the digest."""
        exact = f"not exact: {self.problem}" if self.problem else "exact"
        return f"{exact} (numerics {self.digest})"

    def first_difference(self, other: Numerics) -> tuple[str, str, str] | None:
        """Returns (field, own value, other's value) of the first difference, or None if the digests are equal. An empty
        value is shown as none."""
        for field in _COMPARED:
            ours, theirs = getattr(self, field), getattr(other, field)
            if ours != theirs:
                return field, _shown(ours), _shown(theirs)
        if bool(self.problem) != bool(other.problem):
            return "problem", _shown(self.problem), _shown(other.problem)
        return None


def _shown(value: str | int) -> str:
    return str(value) or "none"


_COMPARED = tuple(field for field in Numerics.__struct_fields__ if field != "problem")
