"""One part of `bench.gpu.check`: runs its cases one by one, prints each result, and writes all of them after each."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec


class Part:
    """Created by a part's `main`. device: cuda, or cpu for a self-test of the part. quick: few and small cases."""

    def __init__(self, name: str, description: str | None) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m bench.gpu.{name}", description=description)
        parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: self-test of this script")
        parser.add_argument("--quick", action="store_true", help="short run that only shows that the part works")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file after each case")
        options = parser.parse_args()
        logging.basicConfig(format="  %(message)s")
        logging.getLogger("tandem").setLevel(logging.INFO)  # why a layer is not fused, and steps have no graph
        self.device: str = options.device
        self.quick: bool = options.quick
        self._file: Path | None = options.json
        self._figures: dict[str, Any] = {}
        self._failures: dict[str, str] = {}
        self._comparisons: list[dict[str, Any]] = []
        self._num_passed = 0
        if self.device == "cuda":
            import torch

            if not torch.cuda.is_available():
                raise SystemExit("no CUDA device is visible; --device cpu runs a self-test")

    @property
    def num_failures(self) -> int:
        return len(self._failures)

    def interpret_kernels(self) -> None:
        """On a CPU, starts the part again in a process whose Triton interprets kernels, or skips it."""
        if self.device == "cuda":
            return
        if "TRITON_INTERPRET" not in os.environ:  # read when Triton is imported, which it is
            environment = os.environ | {"TRITON_INTERPRET": "1"}
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
        triton_version, numpy_version = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
        if triton_version < (3, 7) and numpy_version >= (2, 4):
            self.skip("Triton's interpreter needs Triton 3.7 or NumPy older than 2.4; compiled kernels do not")

    def add(self, name: str, figure: Any) -> None:
        """Records a figure."""
        print(f"  {name}: {figure}", flush=True)
        self._figures[name] = figure
        self._write()

    def compare(
        self, what: str, measured: float, predicted: float | None = None, share: float | None = None,
        of: str = "", aim: float | None = None,
    ) -> None:  # fmt: skip
        """Records a row of the table that ends the check. share: of a limit, which `of` names. aim: for the share."""
        row = {"what": what, "measured": measured, "predicted": predicted, "share": share, "of": of, "aim": aim}
        self._comparisons.append(row)
        print(f"  {what}: {', '.join(f'{name} {value}' for name, value in row.items() if name != 'what')}", flush=True)
        self._write()

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Runs a case. An exception fails it, and does not stop the next one."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            self._failures[name] = "".join(traceback.format_exception(error))[-2000:]
            print(f"  FAILED {name}: {type(error).__name__}: {error}", flush=True)
        else:
            self._num_passed += 1
            print(f"  passed {name} ({time.monotonic() - began:.1f} s)", flush=True)
        self._write()

    def skip(self, reason: str) -> None:
        """Ends the part without a case. Raises SystemExit."""
        self.add("skipped", reason)
        raise SystemExit(0)

    def end(self) -> None:
        """Raises SystemExit: 1 after a failure."""
        print(f"  {self._num_passed} passed, {len(self._failures)} failed", flush=True)
        raise SystemExit(1 if self._failures or not self._num_passed else 0)

    def _write(self) -> None:
        if self._file is not None:
            result = {
                "passed": self._num_passed, "failures": self._failures, "figures": self._figures,
                "comparisons": self._comparisons,
            }  # fmt: skip
            write_json(self._file, result)


def write_json(file: Path, content: object) -> None:
    """Replaces the file at once, so that a reader never finds half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
    scratch.replace(file)
