"""Hides installed packages from Python processes: each looks as if it were not installed."""

from __future__ import annotations

from pathlib import Path

_SITECUSTOMIZE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {names!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def hide_packages(folder: Path, names: set[str]) -> str:
    """Writes a module that Python imports at its start. Returns the folder, for PYTHONPATH. names: of top-level
    modules."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.replace("{names!r}", repr(sorted(names))))
    return str(folder)
