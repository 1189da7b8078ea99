"""A plugin of vLLM whose Llama is slow, fails in a step, or holds one, when a test says so.

`Faults` makes the interpreter that has it. Each step of a worker looks for a file with the worker's process id as its
name. While a step is held, only the engine's thread waits: the worker reports, answers, sends and receives.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

_FOLDER = "TANDEM_TEST_FAULTS"
"""Environment variable that names the folder of the files."""


class Faults:
    """environment: variables of the cluster. python: interpreter for --engine-python, vLLM's with this plugin."""

    def __init__(self, folder: Path, vllm_python: str) -> None:
        self._folder = folder
        self.environment = {_FOLDER: str(folder)}
        plugin = folder / "plugin"
        facts = plugin / "faulty_model-1.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty_model\nVersion: 1\n")
        (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nfaulty_model = faulty_model:register\n")
        shutil.copy(__file__, plugin / "faulty_model.py")
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH="{plugin}:$PYTHONPATH" exec {vllm_python} "$@"\n')
        self.python.chmod(0o755)

    def slow(self, pid: int) -> None:
        """Lets each further step of a worker take at least 20 ms, so that its streams last long on any machine."""
        self._order(pid, "slow")

    def fail(self, pid: int) -> None:
        """Lets the next step of a worker raise."""
        self._order(pid, "fail")

    def poison(self, token_id: int | None) -> None:
        """Lets each step of any worker raise that has this token; None ends it."""
        (self._folder / "poison").unlink(missing_ok=True)
        if token_id is not None:
            (self._folder / "poison").symlink_to(str(token_id))  # made at once

    def hold(self, pid: int, position: int = 0) -> None:
        """Holds the first step of a worker with a token at this position of its sequence, or later, until `release`."""
        self._order(pid, f"hold {position}")

    def is_held(self, pid: int) -> bool:
        return _mark(self._folder, pid).exists()

    def release(self, pid: int) -> None:
        """Ends `slow` and `hold`."""
        (self._folder / str(pid)).unlink(missing_ok=True)

    def _order(self, pid: int, text: str) -> None:
        """Replaces the file at once, so that no worker reads a part of it."""
        (new := self._folder / f"{pid}-is-new").write_text(text)
        new.replace(self._folder / str(pid))


def register() -> None:
    """vLLM calls it in each process that imports models."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    forward, folder = LlamaForCausalLM.forward, Path(os.environ[_FOLDER])

    def order() -> list[str]:
        try:
            return (folder / str(os.getpid())).read_text().split()
        except FileNotFoundError:
            return []

    def holds(positions: Any) -> bool:
        match order():
            case ["hold", position]:
                return bool((positions >= int(position)).any())
        return False

    def is_poisoned(input_ids: Any) -> bool:
        try:
            return bool((input_ids == int((folder / "poison").readlink().name)).any())
        except FileNotFoundError:
            return False

    def faulty(self: Any, input_ids: Any, positions: Any, *arguments: Any, **named: Any) -> Any:
        if is_poisoned(input_ids):
            raise RuntimeError("the model met the poison")
        match order():
            case ["slow"]:
                time.sleep(0.02)
            case ["fail"]:
                raise RuntimeError("the model is broken")
            case ["hold", _] if holds(positions):
                mark = _mark(folder, os.getpid())
                mark.touch()
                while holds(positions):
                    time.sleep(0.01)
                mark.unlink()
        return forward(self, input_ids, positions, *arguments, **named)

    LlamaForCausalLM.forward = faulty


def _mark(folder: Path, pid: int) -> Path:
    """The file that exists while a step is held."""
    return folder / f"{pid}-is-held"
