"""Whether answers are exact: the same bit for bit, whatever else runs and wherever they are computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.proxy.cluster.worker_record import WorkerRecord

_MAX_SHOWN = 3
"""Reasons that are listed, and workers that are named for each."""


def exactness_of(records: Sequence[WorkerRecord]) -> tuple[bool, str]:
    """Returns whether answers are exact, and why or why not, for people; an empty text without workers."""
    if not records:
        return False, ""
    by_problem: dict[str, list[str]] = {}
    by_digest: dict[str, list[WorkerRecord]] = {}
    for record in records:
        by_digest.setdefault(record.numerics.digest, []).append(record)
        if record.numerics.problem:
            by_problem.setdefault(record.numerics.problem, []).append(record.worker.worker_id)
    reasons = [f"{problem} ({_named(names)})" for problem, names in by_problem.items()]
    if reasons:
        return False, f"no: {_listed(reasons)}"
    if len(by_digest) == 1:
        return True, f"yes (numerics {next(iter(by_digest))})"
    (first, *_), *others = by_digest.values()
    differences = [_difference(first, other) for other, *_ in others]
    if all(record.exact for record in records):
        kinds = f"{len(by_digest)} kinds of workers, each of which continues its own answers only"
        return True, f"yes, on {kinds}: {_listed(differences)}"
    return (
        False,
        f"no: workers compute differently: {_listed(differences)}; --exact keeps an answer on workers of one kind",
    )


def _difference(first: WorkerRecord, second: WorkerRecord) -> str:
    difference = first.numerics.first_difference(second.numerics)
    assert difference is not None  # their digests differ
    field, ours, theirs = difference
    return f"{field} is {ours} on {first.worker.worker_id} and {theirs} on {second.worker.worker_id}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _listed(reasons: Sequence[str]) -> str:
    more = f"; and {len(reasons) - _MAX_SHOWN} more" if len(reasons) > _MAX_SHOWN else ""
    return "; ".join(reasons[:_MAX_SHOWN]) + more
