"""Which requests are recorded, and how much is kept, as the operator sets it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from tandem.runtime.errors import ConfigError
from tandem.runtime.files.private_folder import make_private_folder
from tandem.runtime.settings import setting


class RecordSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the records that `tandem replay` reads (docs/replay.md)."""

    # fmt: off
    record: Annotated[str, setting("logging", description=
        "Folder in which every request is recorded, with its prompt and its answer as tokens, for `tandem replay`; "
        "empty records only requests with the header X-Tandem-Record, for their clients.")] = ""
    record_gib: Annotated[float, setting("logging", gt=0, description=
        "Maximum size of --record's folder in GiB; the oldest records are removed.")] = 1.0
    # fmt: on


def check_folder(folder: Path) -> None:
    """Makes the operator's folder if there is none. Raises ConfigError if records cannot be written to it."""
    try:
        make_private_folder(folder, folder)
    except OSError as error:
        raise ConfigError(f"record: cannot make the folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"record: this user may not write to {folder}")
