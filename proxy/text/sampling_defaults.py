"""Defaults of sampling, such as those that the model's authors recommend in its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.proxy.text.whole_numbers import decode_whole
from tandem.runtime.errors import ConfigError

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
        given = Path(source).expanduser()
        file = model_folder / FILE_NAME if source == "auto" else given / FILE_NAME if given.is_dir() else given
        try:
            # Some files have integers such as 50.0.
            defaults: SamplingDefaults = decode_whole(msgspec.json.Decoder(cls), file.read_bytes())
            return defaults
        except FileNotFoundError as error:
            if source == "auto":
                return cls()
            raise ConfigError(f"--generation-config: there is no file {file}; give auto, vllm or a folder") from error
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error

    def known(self) -> dict[str, float]:
        """Returns the defaults that are set, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def fill(self, request: F) -> F:
        """Returns the request with these defaults in the fields that it leaves out."""
        missing = {name: value for name, value in self.known().items() if getattr(request, name, value) is None}
        return msgspec.structs.replace(request, **missing) if missing else request
