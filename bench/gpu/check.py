"""Checks and measures everything that needs a GPU, unattended, in less than nine minutes.

    python -m bench.gpu.check [--device cpu] [--quick] [--parts NAME,...] [--limit-s N] [--json FILE]

The parts run in order of their value, each under a deadline. Time that earlier parts leave unused goes to the next, as
much again as its own at most.
What a part prints appears at once. The report is written after each part, and beside it an archive of all that the
parts printed and wrote. A part that fails, hangs or crashes costs only itself, because all processes that it leaves
behind are killed. A table of what was measured, beside its prediction, is printed at the end. `--device cpu` runs the
same parts on tiny cases, to test this script.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import psutil

from bench.gpu.part import write_json
from bench.support.report import Report

LIMIT_S = 530.0
"""Of the whole run."""
CPU_FACTOR = 4
"""Deadlines of a self-test are longer: a CPU that others use may be slow, and nothing is measured."""


@dataclass(frozen=True)
class PartOfCheck:
    """limit_s: its deadline. command: its arguments for Python, to which --device, --quick and --json are added."""

    name: str
    limit_s: float
    command: tuple[str, ...]


PARTS = (
    PartOfCheck("engine", 75, ("-m", "bench.gpu.engine")),
    PartOfCheck("kernels", 60, ("-m", "bench.gpu.kernels")),
    PartOfCheck("kv_transfer", 30, ("-m", "bench.gpu.kv_transfer")),
    PartOfCheck("checkpoint", 30, ("-m", "bench.gpu.checkpoint")),
    PartOfCheck("quantised", 50, ("-m", "bench.gpu.quantised")),
    PartOfCheck("kills", 35, ("-m", "bench.gpu.kills")),
    PartOfCheck("cluster", 75, ("-m", "bench.gpu.cluster")),
    PartOfCheck("tests", 50, ("-m", "bench.gpu.tests")),
    PartOfCheck("exactness", 45, ("-m", "bench.gpu.exactness")),
    PartOfCheck("families", 45, ("-m", "bench.gpu.families")),
    PartOfCheck("attention", 20, ("-m", "bench.gpu.attention")),
    PartOfCheck("prompt_lengths", 15, ("-m", "bench.gpu.prompt_lengths")),
)
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ends, so that `kill_children` finds all of them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(before: set[int]) -> None:
    """Kills the children that are not in `before`, and then the orphans that they leave.

    A cluster, for example, has a session of its own, and would keep the GPU's memory.
    """
    while started := [child for child in psutil.Process().children() if child.pid not in before]:
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        _, alive = psutil.wait_procs(started, timeout=10)
        if alive:  # in the driver, for example
            print(f"not ended: {', '.join(str(child) for child in alive)}", flush=True)
            return


def run_part(part: PartOfCheck, options: Sequence[str], folder: Path, limit_s: float) -> dict[str, Any]:
    """Runs a part and returns its result. Its output goes to our own and to FOLDER/NAME.log."""
    file, log = folder / f"{part.name}.json", folder / f"{part.name}.log"
    file.unlink(missing_ok=True)
    began = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    others = {child.pid for child in psutil.Process().children()}
    with log.open("wb") as kept:
        process = subprocess.Popen(
            [sys.executable, *part.command, *options, "--json", str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, env=environment,
        )  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(target=_copy_output, args=(process.stdout, kept), daemon=True)
        reader.start()
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        kill_children(others)
        process.wait()
        reader.join(5)
    result: dict[str, Any] = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):
        result = msgspec.json.decode(file.read_bytes())
    problem = "" if status == 0 else f"not finished within {limit_s:.0f} s" if status is None else f"status {status}"
    output = log.read_bytes().decode(errors="replace")[-6000:]
    seconds = round(time.monotonic() - began, 1)
    ended = {"output": output} if problem else {}  # else the archive has it
    return {"problem": problem, "seconds": seconds, **result, **ended, "memory_after": memory_in_use()}


def _copy_output(output: BinaryIO, kept: BinaryIO) -> None:
    with output:
        for line in output:
            kept.write(line)
            kept.flush()
            sys.stdout.buffer.write(line)
            sys.stdout.flush()


def memory_in_use() -> dict[str, float]:
    """MiB in use, of each GPU and of the host."""
    found: dict[str, float] = {}
    for number, used in enumerate(ask_nvidia_smi("memory.used")):
        with contextlib.suppress(ValueError):
            found[f"gpu_{number}"] = float(used)
    lines = Path("/proc/meminfo").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return found | {"host": round((kib["MemTotal"] - kib["MemAvailable"]) / 1024)}


def ask_nvidia_smi(fields: str) -> list[str]:
    """Returns a line for each GPU; none without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def run_all(parts: Sequence[PartOfCheck], options: Sequence[str], file: Path, limit_s: float = LIMIT_S) -> bool:
    """Runs the parts in turn and returns whether all passed.

    file: the report. The archive beside it has the same name with `.tar.gz`. Both are written after each part.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run_all(parts, options, file, limit_s, Path(folder))


def _run_all(
    parts: Sequence[PartOfCheck], options: Sequence[str], file: Path, limit_s: float, folder: Path
) -> bool:  # fmt: skip
    began = time.monotonic()
    figures: dict[str, Any] = {
        "gpus": ask_nvidia_smi("name,memory.total,driver_version"), "options": list(options),
        "memory_before": memory_in_use(), "parts": {},
    }  # fmt: skip
    for number, part in enumerate(parts):
        left = limit_s - (time.monotonic() - began)
        unused = left - sum(later.limit_s for later in parts[number:])
        part_limit_s = min(left, part.limit_s + min(max(0.0, unused), part.limit_s))
        print(f"{part.name} (at most {max(0.0, part_limit_s):.0f} s)", flush=True)
        try:
            if left < 5:
                result: dict[str, Any] = {"problem": f"no time left of {limit_s:.0f} s"}
            else:
                result = run_part(part, options, folder, part_limit_s)
        except Exception as error:  # this part's, and no reason to lose the next
            result = {"problem": f"{type(error).__name__}: {error}"}
        print(f"{part.name}: {result['problem'] or 'passed'}", flush=True)
        figures["parts"][part.name] = result
        figures["seconds"] = round(time.monotonic() - began, 1)
        figures["memory_after"] = memory_in_use()
        write_json(file, Report.of("gpu.check", figures))
        with tarfile.open(file.with_suffix(".tar.gz"), "w:gz") as archive:
            archive.add(folder, file.stem)
    print("\n".join(["", *result_table(figures["parts"]), f"wrote {file}"]), flush=True)
    return not any(result["problem"] for result in figures["parts"].values())


def result_table(parts: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table that ends the check: how each part ended, and what was measured."""
    for name, result in parts.items():
        failures = ", ".join(result.get("failures", {}))
        skipped = result.get("figures", {}).get("skipped")
        ended = result["problem"] or (f"skipped: {skipped}" if skipped else "passed")
        yield f"{name:<40} {ended}, {result.get('passed', 0)} cases passed{f'; failed: {failures}' if failures else ''}"
    yield ""
    yield f"{'':<40} {'measured':>10} {'predicted':>10} {'ratio':>7}  share"
    for result in parts.values():
        for row in result.get("comparisons", []):
            measured, predicted, share, aim = (row[name] for name in ("measured", "predicted", "share", "aim"))
            ratio = f"{measured / predicted:.2f}" if predicted else "-"
            shown = "" if share is None else f"{share:.2f} of the {row['of']}"
            aimed = "" if aim is None else f", aim {aim} {'reached' if share >= aim else 'missed'}"
            expected = "-" if predicted is None else f"{predicted:.4g}"
            yield f"{row['what']:<40} {measured:>10.4g} {expected:>10} {ratio:>7}  {shown}{aimed}".rstrip()
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.check", description=__doc__)
    names = ",".join(part.name for part in PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: self-test of this script")
    parser.add_argument("--quick", action="store_true", help="few and small cases")
    parser.add_argument("--parts", default=names, help=f"which to run, of {names}")
    parser.add_argument("--limit-s", type=float, metavar="N", default=LIMIT_S, help="of all parts together")
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path("bench/results/gpu_check.json"))
    options = parser.parse_args()
    if options.device == "cuda" and not (shutil.which("gcc") or shutil.which("cc") or os.environ.get("CC")):
        parser.error("Triton needs a C compiler: install gcc, or set CC; without one only plain attention would run")
    unknown = set(options.parts.split(",")) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; known are {names}")
    passed_on = ["--device", options.device, *(["--quick"] if options.quick else [])]
    factor = CPU_FACTOR if options.device == "cpu" else 1
    parts = [replace(part, limit_s=factor * part.limit_s) for part in PARTS if part.name in options.parts.split(",")]
    adopt_orphans()
    if not run_all(parts, passed_on, options.json, factor * options.limit_s):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
