"""How embeddings are made, from the model's files: sentence-transformers' modules.json, and Matryoshka in config.json.

As in vLLM, a decoder without such files gives the last token's hidden state, scaled to length 1.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from tandem.protocol.messages.sampling import Pooling
from tandem.runtime.errors import InvalidRequest
from tandem.runtime.files.model_json import read_model_json


class EmbeddingDefaults(msgspec.Struct, frozen=True):
    """Defaults of one model's embeddings.

    unsupported: the pooling that the files ask for, if Tandem does not have it. is_matryoshka: embeddings may be
    shortened, to one of matryoshka_dimensions if there are any, else to any number up to size.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    unsupported: str = ""
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] = []
    size: int = 0

    @classmethod
    def read(cls, folder: Path) -> EmbeddingDefaults:
        """Reads the files in the model's folder that are there. Raises ConfigError for one that cannot be read."""
        config = read_model_json(folder / "config.json", dict[str, Any]) or {}
        known: list[int] = config.get("matryoshka_dimensions") or []
        defaults = cls(
            is_matryoshka=bool(known or config.get("is_matryoshka")),
            matryoshka_dimensions=known,
            size=_size(config),
        )
        modules = read_model_json(folder / "modules.json", list[dict[str, Any]])
        if modules is None:
            return defaults
        kinds = {str(module.get("type", "")).rsplit(".", 1)[-1]: module for module in modules}
        defaults = msgspec.structs.replace(defaults, normalize="Normalize" in kinds)
        if "Pooling" not in kinds:
            return defaults
        path = kinds["Pooling"].get("path", "1_Pooling")
        pooling = read_model_json(folder / path / "config.json", dict[str, Any]) or {}
        modes = [key.removeprefix("pooling_mode_") for key, value in pooling.items() if value is True]
        modes = [mode for mode in (pooling.get("pooling_mode"), *modes) if isinstance(mode, str)]
        names: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
        found = [names[mode] for mode in modes if mode in names]
        others = [mode for mode in modes if mode in ("cls_token", "cls", "max_tokens", "max", "weightedmean_tokens")]
        if found:
            return msgspec.structs.replace(defaults, pooling=found[0])
        return msgspec.structs.replace(defaults, unsupported=others[0]) if others else defaults

    def check(self) -> None:
        """Raises InvalidRequest if the model's embeddings are not supported."""
        if self.unsupported:
            raise InvalidRequest(
                f"This model's embeddings use {self.unsupported} pooling; only the last token's and the mean are "
                "supported."
            )

    def check_dimensions(self, dimensions: int) -> None:
        """Raises InvalidRequest. All values of an embedding may be asked for from any model."""
        if dimensions == self.size:
            return
        if not self.is_matryoshka:
            raise InvalidRequest(
                f"dimensions is {dimensions}, but this model's embeddings cannot be shortened; leave it out.",
                "dimensions",
            )
        known = self.matryoshka_dimensions
        if (known and dimensions not in known) or (self.size and dimensions > self.size):
            allowed = f"one of {', '.join(map(str, known))}" if known else f"at most {self.size}"
            raise InvalidRequest(f"dimensions is {dimensions}, but must be {allowed}.", "dimensions")


def _size(config: dict[str, Any]) -> int:
    """Returns the number of values that the model's hidden states have; 0 if the config does not say it."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in ("hidden_size", "n_embd", "d_model"):
            if isinstance(size := part.get(name), int | float) and math.isfinite(size):
                return int(size)
    return 0
