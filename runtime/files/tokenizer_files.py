"""Loads tokenisers. Published tokenizer.json files may tell them to cut or to fill texts, which servers must not do."""

from __future__ import annotations

from typing import Any

_LENGTHS = ("max_length", "stride", "truncation_strategy", "pad_to_multiple_of")
"""Arguments that transformers takes over from tokenizer.json, and gives to later calls of a processor."""


def load_tokenizer(model: str) -> Any:
    """Returns transformers' `TokenizersBackend` of a model folder or hub id. Imports no torch, but takes a second.

    It neither truncates nor pads: the settings in tokenizer.json are those of its author's last training or export.
    Raises any exception if the files cannot be used.
    """
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    return without_length_limits(TokenizersBackend.from_pretrained(model))


def without_length_limits(tokenizer: Any) -> Any:
    """Switches truncation and padding off for good, and returns the tokeniser. tokenizer: of transformers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    remembered: dict[str, Any] = getattr(tokenizer, "init_kwargs", {})
    for name in _LENGTHS:
        remembered.pop(name, None)
    return tokenizer
