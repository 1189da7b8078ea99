"""A LoRA adapter as requests name it."""

from __future__ import annotations

import msgspec


class AdapterRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """digest: of the adapter's files (`runtime.files.lora_files`); part of prefix hashes. folder: absolute path from
    which workers load it."""

    digest: str
    folder: str
