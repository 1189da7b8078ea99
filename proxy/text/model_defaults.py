"""What a model's files say about requests that leave it out: how to sample, and how to make embeddings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from tandem.protocol.messages.sampling import Pooling
from tandem.runtime.errors import ConfigError, InvalidRequest
from tandem.runtime.files.model_json import read_model_json
from tandem.runtime.files.user_paths import expanded

FILE_NAME = "generation_config.json"

F = TypeVar("F", bound=msgspec.Struct)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Defaults for fields that a request leaves out or sets to null; None leaves the server's own default.

    max_new_tokens: of chats, as in vLLM.
    """

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None

    @classmethod
    def read(cls, model_folder: Path, source: str = "auto") -> SamplingDefaults:
        """Reads generation_config.json. Raises ConfigError for values that cannot be used.

        source: "auto" for the one in the model's folder, if there is one; "vllm" for none; else the folder, or the
        file, that has one.
        """
        if source == "vllm":
            return cls()
        given = expanded(source)
        file = model_folder / FILE_NAME if source == "auto" else given / FILE_NAME if given.is_dir() else given
        defaults = read_model_json(file, cls)
        if defaults is None:
            if source == "auto":
                return cls()
            raise ConfigError(f"--generation-config: there is no file {file}; give auto, vllm or a folder")
        for name, value in defaults.known().items():
            if not math.isfinite(value):
                raise ConfigError(f"cannot read {file}: {name} is {value}, but must be a finite number")
        return defaults

    def known(self) -> dict[str, float]:
        """Returns the defaults that are set, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def fill(self, request: F) -> F:
        """Returns the request with these defaults in the fields that it leaves out."""
        missing = {name: value for name, value in self.known().items() if getattr(request, name, value) is None}
        return msgspec.structs.replace(request, **missing) if missing else request


class EmbeddingDefaults(msgspec.Struct, frozen=True):
    """Defaults of one model's embeddings, from sentence-transformers' modules.json, and Matryoshka in config.json.

    As in vLLM, a decoder without such files gives the last token's hidden state, scaled to length 1.

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
