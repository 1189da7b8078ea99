"""Sampling parameters that the model's authors recommend, from its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from tandem.runtime.errors import ConfigError

F = TypeVar("F", bound=msgspec.Struct)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Defaults for fields that a request leaves out or sets to null; None leaves the server's own default."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None

    @classmethod
    def read(cls, folder: Path) -> SamplingDefaults:
        """Read the file in the model's folder, if there is one. Raises ConfigError for values that cannot be used."""
        file = folder / "generation_config.json"
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except FileNotFoundError:
            return cls()
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"cannot read {file}: {error}") from error

    def fill(self, request: F) -> F:
        """The request with these defaults in the fields that it leaves out."""
        known = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        missing = {name: value for name, value in known.items() if getattr(request, name) is None}
        return msgspec.structs.replace(request, **missing) if missing else request
