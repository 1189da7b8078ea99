"""Faults made by a machine, each tried on seeds of the simulator and on the unit tests of its package.

    python -m tests.mutants.run_mutants [--number 40] [--seed 1] [--seeds 100] [--rest] [--limit-s SECONDS]
        [--spare] [--package proxy/dispatch]... [--test test_generation]... [--kept FILE] [--json FILE]

cosmic-ray makes the faults (`draw_mutants.py`). Each is put into a copy of the source, in which the tests and the
simulator run as processes. Reports the share that the seeds show, the tests, and neither, and prints the latter. Of
mutants that pass the tests, seeds take a minute each, so with --rest they are spared for those that the tests show.

--spare also says which unit tests the sample did not need, and how many mutants each of them showed: seeds or scripts
show all of these, too. All tests run with each mutant then, also after one has failed, and seeds with those that a unit
test shows and no script does. It is a question for a reader, not an answer: a sample of a few mutants for a test says
little, and none shows a wrong text of an error or a documented example. `spare_tests.md` has what became of them. As
pytest and the seeds take most of a minute for a mutant, --package takes a file, and --test names the modules of tests
that the question is about; scripts run, too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec

from bench.support.report import Aim, Report
from tests.simulation.mutation import Mutation

ROOT = Path(__file__).parents[2]
COSMIC_RAY = "cosmic-ray==8.7.0"
SCRIPTED = "/test_scripts.py::"
"""Is in the names of tests that play scripts (`tests/support/scripts.py`)."""
_TESTS_LIMIT_S = 90.0
_SEEDS_LIMIT_S = 1200.0
"""Limits after which a process counts as hanging, which shows the fault. Most take a tenth."""
_ENGINES = {"prefill_worker": "tandem", "decode_worker": "tandem", "vllm_worker": "vllm"}
"""Engines whose seeds alone run a package, by its first folder."""

_PYTEST = ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-m", "not extended", "--timeout", "60"]


class Outcome(msgspec.Struct):
    """A mutant, and whether something failed with it. None: not tried. failed: the tests, if all of them were run."""

    mutant: Mutation
    by_tests: bool | None = None
    by_seeds: bool | None = None
    failed: list[str] | None = None

    @property
    def is_decided(self) -> bool:
        """Whether it is known whether something shows the mutant."""
        return bool(self.by_tests or self.by_seeds) or (self.by_tests is not None and self.by_seeds is not None)

    @property
    def by_scripts(self) -> bool:
        return any(SCRIPTED in each for each in self.failed or ())

    def needs_seeds(self, only_rest: bool, runs_all: bool) -> bool:
        """Whether seeds have to be tried with the mutant after the tests (`SourceCopy.attempt`)."""
        if runs_all:
            return bool(self.failed) and not self.by_scripts
        return not (only_rest and self.by_tests)


def draw(number: int, seed: int, packages: Sequence[str] = ()) -> list[Mutation]:
    """Returns random mutants, for which cosmic-ray is installed into a temporary environment.

    packages: their folders or files; with none, all of the control's.
    """
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    script = Path(__file__).with_name("draw_mutants.py")
    command = [
        uv,
        "run",
        "--no-project",
        "--with",
        COSMIC_RAY,
        "python",
        str(script),
        str(ROOT),
        str(number),
        str(seed),
        *packages,
    ]
    return msgspec.json.decode(subprocess.run(command, check=True, capture_output=True).stdout, type=list[Mutation])


def package_of(file: str) -> str:
    """Returns the package of a file as it is imported: proxy.dispatch for proxy/dispatch/sequence.py."""
    parts = Path(file).parts[:-1]
    return ".".join(("tandem", *parts[: 2 if parts[0] in ("proxy", "deploy") else 1]))


class SourceCopy:
    """A copy of the source in which mutants are tried, one at a time."""

    def __init__(self, folder: Path, tests: Collection[str] = ()) -> None:
        """tests: names of the modules of unit tests that run besides the scripts; all if empty."""
        self._root = folder / "source"
        self._tests = {f"{each}.py" for each in tests} if tests else None
        for name in subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines():
            (copy := self._root / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copyfile(ROOT / name, copy)
        (folder / "tandem").symlink_to(self._root)
        self._sound: set[str] = set()
        self._environment = os.environ | {"PYTHONPATH": str(folder)}  # is looked at before installed packages

    def tests_of(self, package: str, file: str = "") -> list[str]:
        """Returns the unit tests that import the package: scripts, and those in its folder or the nearest one above.

        Scripts of all packages come first, because a fault that they show need not be tried on seeds, and other tests
        may wait long for what it keeps from happening. Then come those that import `file`, the most likely to show a
        fault in it.
        """
        unit = self._root / "tests" / "unit"
        folder = unit / Path(*package.split(".")[1:])
        while not folder.is_dir():
            folder = folder.parent
        module = f" tandem.{file.removesuffix('.py').replace('/', '.')} "
        asked = [each for each in folder.rglob("test_*.py") if self._tests is None or each.name in self._tests]
        sources = {str(each): each.read_text() for each in sorted({*asked, *unit.rglob("test_scripts.py")})}
        found = [each for each, source in sources.items() if f" {package}" in source]
        return sorted(found, key=lambda each: (not each.endswith("/test_scripts.py"), module not in sources[each]))

    def attempt(self, outcome: Outcome, num_seeds: int, *, only_rest: bool = False, runs_all: bool = False) -> None:
        """Tries what has not been tried. only_rest: runs no seeds with a mutant that the tests show.

        runs_all: notes all tests that fail, and runs seeds only with a mutant that tests show and scripts do not.

        Raises AssertionError if the mutant's text is not there exactly once, or if the tests of its package fail
        without it.
        """
        mutant = outcome.mutant
        if (package := package_of(mutant.file)) not in self._sound:
            assert not self._tests_fail(package), f"the tests of {package} fail without a mutant"
            assert self._sound or not num_seeds or not self._seeds_fail(1, mutant.file), "a seed fails without a mutant"
            self._sound.add(package)
        file = self._root / mutant.file
        source = file.read_text()
        assert source.count(mutant.old) == 1, f"{mutant.file} has changed: {mutant.old}"
        file.write_text(source.replace(mutant.old, mutant.new))
        try:
            if runs_all and outcome.failed is None:
                outcome.by_tests, outcome.failed = self._failing_tests(package, mutant.file)
            if outcome.by_tests is None:
                outcome.by_tests = self._tests_fail(package, mutant.file)
            if outcome.by_seeds is None and num_seeds and outcome.needs_seeds(only_rest, runs_all):
                outcome.by_seeds = self._seeds_fail(num_seeds, mutant.file)
        finally:
            file.write_text(source)

    def _tests_fail(self, package: str, file: str = "") -> bool:
        return self._fails([*_PYTEST, "-q", "-x", *self.tests_of(package, file)], _TESTS_LIMIT_S)

    def _failing_tests(self, package: str, file: str) -> tuple[bool, list[str]]:
        """Returns whether something failed, and the names of the tests.

        They lack those behind one that hangs, and all if the tests cannot be imported.
        """
        options = ["-v", "--tb=no", "-o", "console_output_style=classic"]
        with (self._root / "tests_output").open("w+") as output:
            fails = self._fails([*_PYTEST, *options, *self.tests_of(package, file)], _TESTS_LIMIT_S, output)
            output.seek(0)
            return fails, failed_tests(output.read())

    def _seeds_fail(self, num_seeds: int, file: str) -> bool:
        engine = _ENGINES.get(file.partition("/")[0], "")
        return self._fails(["-m", "tests.mutants.play_seeds", str(num_seeds), engine], _SEEDS_LIMIT_S)

    def _fails(self, arguments: list[str], limit_s: float, output: TextIO | None = None) -> bool:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(
            command, cwd=self._root, env=self._environment, stdout=output or subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s) != 0
        except subprocess.TimeoutExpired:
            return True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)  # also what a broken process has left
            process.wait()


def failed_tests(output: str) -> list[str]:
    """Returns the names of tests that failed, or ran when the output ended, from what pytest prints with -v."""
    found = re.findall(r"^(tests/\S+?::.*?) (?:FAILED|ERROR)", output, re.MULTILINE)
    if hanging := re.search(r"^(tests/\S+?::.*?) ?\Z", output, re.MULTILINE):
        found.append(hanging[1])
    return found


def spare_tests(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Returns the tests of which each mutant that they show is shown by seeds or scripts, too, with their number.

    A test with parameters is one. Tests that show no mutant are not among them, as nothing is known of them.
    """
    shown: Counter[str] = Counter()
    needed: set[str] = set()
    for outcome in outcomes:
        names = {each.partition("[")[0] for each in outcome.failed or () if SCRIPTED not in each}
        shown.update(names)
        if not outcome.by_scripts and not outcome.by_seeds:
            needed |= names
    return {name: shown[name] for name in sorted(shown.keys() - needed)}


def interval(num_found: int, num: int) -> tuple[float, float]:
    """Returns the limits of the share in all mutants, with a confidence of 95 % (Wilson)."""
    z = 1.96
    share, scale = num_found / num, 1 + z * z / num
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num)) / scale
    middle = (share + z * z / (2 * num)) / scale
    return round(max(0.0, middle - half), 3), round(min(1.0, middle + half), 3)


def report(outcomes: Sequence[Outcome], num_seeds: int) -> Report:
    """Leaves out the mutants that are not decided."""
    decided = [each for each in outcomes if each.is_decided]
    num_neither = sum(not each.by_seeds and not each.by_tests for each in decided)
    tried = [each for each in decided if each.by_seeds is not None]
    by_package = Counter((package_of(each.mutant.file), bool(each.by_seeds or each.by_tests)) for each in decided)
    figures: dict[str, Any] = {
        "num_drawn": len(outcomes),
        "num_mutants": len(decided),
        "num_seeds": num_seeds,
        "shown_by": {
            "tests": sum(bool(each.by_tests) for each in decided),
            "seeds": sum(bool(each.by_seeds) for each in decided),
            "neither": num_neither,
        },
        "num_tried_on_seeds": len(tried),
        "share_shown_by_neither": round(num_neither / len(decided), 3),
        "interval_of_that_share": interval(num_neither, len(decided)),
        "by_package": {
            name: {"shown": by_package[name, True], "not_shown": by_package[name, False]}
            for name in sorted({name for name, _ in by_package})
        },
        "not_shown": [each.mutant._asdict() for each in decided if not each.by_seeds and not each.by_tests],
    }
    if any(each.failed is not None for each in outcomes):
        figures["spare_tests"] = spare_tests(outcomes)
    return Report.of("mutants", figures, [Aim.of("share shown by neither", num_neither / len(decided), 0.1, "lower")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--seeds", type=int, default=100, help="of the simulator for each mutant; with 0 tests alone")
    parser.add_argument("--rest", action="store_true", help="seeds only for mutants that the tests do not show")
    parser.add_argument(
        "--spare", action="store_true", help="name the tests that show nothing but what seeds or scripts show"
    )
    parser.add_argument(
        "--package", action="append", default=[], help="a folder or file that mutants are drawn from, as proxy/dispatch"
    )
    parser.add_argument(
        "--test", action="append", default=[], help="a module of unit tests that runs with the scripts; else all run"
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no further mutants are tried after this time")
    parser.add_argument("--kept", type=Path, help="keeps the outcomes in this file, and goes on from what it has")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kept: Path | None = options.kept
    ends_at = time.monotonic() + options.limit_s
    if kept and kept.exists():
        outcomes = msgspec.json.decode(kept.read_bytes(), type=list[Outcome])
    else:
        outcomes = [Outcome(each) for each in draw(options.number, options.seed, options.package)]
    with tempfile.TemporaryDirectory() as folder:
        copy = SourceCopy(Path(folder), options.test)
        for number, outcome in enumerate(outcomes, 1):
            if time.monotonic() > ends_at:
                break
            is_listed = outcome.failed is not None or not options.spare
            is_tried = outcome.by_tests is not None and is_listed
            needs_seeds = options.seeds and outcome.needs_seeds(options.rest, options.spare)
            if is_tried and (outcome.by_seeds is not None or not needs_seeds):
                continue
            copy.attempt(outcome, options.seeds, only_rest=options.rest, runs_all=options.spare)
            words = {True: "shown", False: "not shown", None: "not tried"}
            print(
                f"{number}/{len(outcomes)} {outcome.mutant.file}: {outcome.mutant.what}: by tests "
                f"{words[outcome.by_tests]}, by seeds {words[outcome.by_seeds]}",
                flush=True,
            )
            if not outcome.by_tests and not outcome.by_seeds:
                print(f"{outcome.mutant.old}--->\n{outcome.mutant.new}", flush=True)
            if kept:
                kept.write_bytes(msgspec.json.encode(outcomes))
    made = report(outcomes, options.seeds)
    print(made.figures["shown_by"])
    for name, num_shown in made.figures.get("spare_tests", {}).items():
        print(f"{num_shown:3} {name}")
    if options.json:
        made.write(options.json)


if __name__ == "__main__":
    main()
