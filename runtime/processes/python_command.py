"""How Tandem starts Python. A test lets no other product code start it.

`python -m` puts the working folder first on the path for imports, and `python -c` does too. An operator may run `tandem
up` in any folder, such as one with downloads: a file `msgspec.py` in it would run in every process.
"""

from __future__ import annotations

import sys
from types import MappingProxyType

SAFE_PATH = MappingProxyType({"PYTHONSAFEPATH": "1"})
"""Environment with which also what a library starts, such as torch's compilers, leaves out the working folder."""


def python_command(*arguments: str, python: str = "") -> list[str]:
    """Returns the command line of an interpreter that imports nothing from its working folder.

    python: "" for our own.
    """
    return [python or sys.executable, "-P", *arguments]
