"""Command lines of Python processes: of those that are started, and what `ps` shows for those that are forked."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import MappingProxyType

SAFE_PATH = MappingProxyType({"PYTHONSAFEPATH": "1"})
"""Environment with which also what a library starts, such as torch's compilers, leaves out the working folder."""

LAUNCHER_PYTHON = "TANDEM_LAUNCHER_PYTHON"
"""Variable in the environment of a worker with another interpreter than Tandem's: the path of Tandem's own, for what
the worker starts that needs a library of Tandem in its version."""


def python_command(*arguments: str, python: str = "") -> list[str]:
    """Returns the command line of an interpreter that imports nothing from its working folder.

    python: "" for our own.
    """
    return [python or sys.executable, "-P", *arguments]


SPACE = "." * 400
"""Argument for a process whose forks show their own command lines: these must fit into its own."""


def show_command_line(module: str, *arguments: str) -> None:
    """Replaces this process's command line, in /proc and in `sys`, by that of `python -m module`.

    What does not fit is cut off in /proc.
    """
    words = python_command("-m", module, *arguments)
    sys.argv, sys.orig_argv = [module, *arguments], words
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = b"".join(word.encode() + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)
