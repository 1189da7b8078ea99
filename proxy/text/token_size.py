"""The largest number of characters per token, which proves that a text is too long without tokenising it."""

from __future__ import annotations

from typing import Any

import msgspec
from tokenizers import Tokenizer


def max_characters_per_token(tokenizer: Tokenizer) -> int | None:
    """Returns the length of the longest token, or None if a token may stand for more text than that.

    Byte-level BPE (GPT-2's kind, which most models use) keeps every byte, and a token of N bytes stands for at most N
    characters. Normalisers, splitters that remove text, added tokens that strip whitespace and unknown tokens break
    this.
    """
    rules: dict[str, Any] = msgspec.json.decode(tokenizer.to_str())
    model, added = rules["model"], rules["added_tokens"]
    splitters = _flat(rules["pre_tokenizer"])
    keeps_all = (
        rules["normalizer"] is None
        and model["type"] == "BPE"
        and model.get("unk_token") is None
        and any(splitter["type"] == "ByteLevel" for splitter in splitters)
        and all(_keeps_all(splitter) for splitter in splitters)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not keeps_all:
        return None
    return max(max(map(len, model["vocab"]), default=1), max((len(token["content"]) for token in added), default=1))


def _flat(splitter: dict[str, Any] | None) -> list[dict[str, Any]]:
    if splitter is None:
        return []
    return splitter["pretokenizers"] if splitter["type"] == "Sequence" else [splitter]


def _keeps_all(splitter: dict[str, Any]) -> bool:
    return splitter["type"] in ("ByteLevel", "Digits") or (
        splitter["type"] == "Split" and splitter["behavior"] != "Removed"
    )
