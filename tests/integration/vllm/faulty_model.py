"""A plugin of vLLM whose Llama is slow, fails in a step, or hangs, when a test says so.

`Faults` makes the interpreter that has it. Each step of a worker looks for a file with the worker's process id as its
name.
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
        (self._folder / str(pid)).write_text("slow")

    def fail(self, pid: int) -> None:
        """Lets the next step of a worker raise."""
        (self._folder / str(pid)).write_text("fail")

    def hang(self, pid: int) -> None:
        """Lets the next step of a worker never end."""
        (self._folder / str(pid)).write_text("hang")


def register() -> None:
    """vLLM calls it in each process that imports models."""
    from vllm.model_executor.models.llama import LlamaForCausalLM

    forward, folder = LlamaForCausalLM.forward, Path(os.environ[_FOLDER])

    def faulty(self: Any, *arguments: Any, **named: Any) -> Any:
        file = folder / str(os.getpid())
        fault = file.read_text() if file.exists() else ""
        if fault == "slow":
            time.sleep(0.02)
        if fault == "fail":
            raise RuntimeError("the model is broken")
        while fault == "hang":
            time.sleep(1.0)
        return forward(self, *arguments, **named)

    LlamaForCausalLM.forward = faulty
