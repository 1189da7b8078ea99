"""Faults that are put into the product one at a time, to see whether the simulated cluster shows them.

    python -m tests.simulation.cluster_mutations [--seeds 500] [--only NAME,...] [--json FILE]

Each replaces one text of one file, which must occur there exactly once, so the list follows the code. A process is
forked for each, in which functions get the changed code; it runs seeds until one breaks a rule. A fault that no
seed shows means that the draw or the checks are too weak, or that the code is not needed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import msgspec

from bench.support.report import Aim, Report
from tandem.simulator.run import run
from tandem.simulator.scenario import draw
from tests.simulation.batch_mutations import BATCHES
from tests.simulation.blame_mutations import BLAME
from tests.simulation.mutation import Mutation
from tests.simulation.policy_mutations import PURE, TRANSFERS, VIEWS
from tests.simulation.sampling_mutations import SAMPLING
from tests.simulation.service_mutations import IN_ORDER, PLANS, RANKS, SERVICE
from tests.simulation.shell_mutations import LAUNCH, SHELL
from tests.simulation.vllm_mutations import VLLM

ROOT = Path(__file__).parents[2]
SEEDS_AT_ONCE = 10
MUTATIONS = (
    SHELL + PURE + TRANSFERS + VIEWS + LAUNCH + SAMPLING + IN_ORDER + SERVICE + BLAME + BATCHES + PLANS + RANKS + VLLM
)


def mutated(mutation: Mutation) -> str:
    """Returns the changed source. Raises AssertionError unless the text occurs once."""
    source = (ROOT / mutation.file).read_text()
    num = source.count(mutation.old)
    assert num == 1, f"{mutation.file} has {num} times: {mutation.old}"
    return source.replace(mutation.old, mutation.new)


def apply(mutation: Mutation) -> None:
    """Gives the functions of the imported module the changed code."""
    module = importlib.import_module("tandem." + mutation.file.removesuffix(".py").replace("/", "."))
    changed = ModuleType(module.__name__)
    exec(compile(mutated(mutation), mutation.file, "exec", dont_inherit=True), vars(changed))
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        _replace_code(value, vars(changed)[name])
        for member, function in vars(value).items() if isinstance(value, type) else ():
            _replace_code(function, vars(vars(changed)[name]).get(member))


def _replace_code(old: Any, new: Any) -> None:
    for attribute in ("fget", "__func__"):  # of properties and class methods
        old, new = getattr(old, attribute, old), getattr(new, attribute, new)
    if isinstance(old, FunctionType) and isinstance(new, FunctionType):
        old.__code__ = new.__code__


def _first_violation(mutation: Mutation, seeds: Sequence[int], answers: Any) -> None:
    """Runs in a process of its own. Puts the first seed that shows the fault, and the rule that it breaks."""
    try:
        apply(mutation)
    except BaseException as error:  # else `find` would wait for nothing
        answers.put(error)
        raise
    for seed in seeds:
        scenario = draw(seed)
        try:
            rule = next(map(str, run(scenario).violations), None)
        except Exception as error:  # which ends the simulation, so that nobody overlooks it
            rule = f"raises {type(error).__name__}: {error}"
        if rule is not None:
            answers.put((seed, rule.replace(f"{ROOT}/", "")))
            return
    answers.put((None, ""))


def find(mutation: Mutation, seeds: Sequence[int], timeout_s: float = 1800.0) -> tuple[int | None, str]:
    """Returns the first seed that shows the fault and the rule that it breaks, or (None, "")."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    process = context.Process(target=_first_violation, args=(mutation, seeds, answers))
    process.start()
    try:
        found: tuple[int | None, str] | BaseException = answers.get(timeout=timeout_s)
    finally:
        process.kill()
        process.join()
    if isinstance(found, BaseException):
        raise found
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no further seeds are tried after this time")
    parser.add_argument("--only", default="", help="mutations that contain one of these texts, separated by commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ends_at = time.monotonic() + options.limit_s
    chosen = [each for each in MUTATIONS if any(text in each.what for text in options.only.split(","))]
    found: dict[Mutation, tuple[int | None, int, str]] = dict.fromkeys(chosen, (None, 0, ""))
    while missing := [each for each in chosen if found[each][0] is None and found[each][1] < options.seeds]:
        for mutation in missing:  # some more seeds for each, so that a limit leaves out none
            if time.monotonic() > ends_at:
                break
            num_tried = found[mutation][1]
            last = min(options.seeds, num_tried + SEEDS_AT_ONCE)
            seed, rule = find(mutation, range(num_tried + 1, last + 1))
            found[mutation] = seed, seed or last, rule
            if seed is not None or last == options.seeds:
                print(f"{seed or '-':>4}  {mutation.what} ({mutation.file}): {rule[:160]}", flush=True)
        if time.monotonic() > ends_at:
            break
    report = [
        {
            "fault": mutation.what,
            "file": mutation.file,
            "part": "shell" if mutation in SHELL + LAUNCH else "pure",
            "seed": seed,
            "num_seeds": num_seeds,
            "rule": rule,
        }
        for mutation, (seed, num_seeds, rule) in found.items()
    ]
    num_found = sum(each["seed"] is not None for each in report)
    print(f"{num_found} of {len(report)} found within {options.seeds} seeds")
    if options.json:
        made_report(report, options.seeds).write(options.json)


def made_report(found: list[dict[str, Any]], num_seeds: int) -> Report:
    """found: each mutation with the first seed that shows it, or None, the number of seeds run, and the rule."""
    num_found = sum(each["seed"] is not None for each in found)
    aims = [Aim.of("mutations that a seed shows", num_found, len(found), "higher")]
    command = f"python -m tests.simulation.cluster_mutations --seeds {num_seeds}"
    return msgspec.structs.replace(Report.of("simulator_mutations", {"mutations": found}, aims), command=command)


if __name__ == "__main__":
    main()
