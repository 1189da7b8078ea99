"""Whether answers are exact: the same bit for bit, whatever else runs and wherever they are computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES
from tandem.proxy.cluster.worker_record import WorkerRecord

_MAX_SHOWN = 3
"""Reasons that are listed, and workers that are named for each."""


def exactness_of(records: Sequence[WorkerRecord], decode_may_prefill: bool) -> tuple[bool, str]:
    """Returns whether answers are exact, and why or why not, for people; an empty text without workers.

    decode_may_prefill: see `WorkerTable`.
    """
    if not records:
        return False, ""
    is_exact, text = _exactness(records)
    unused = unused_kinds(records, decode_may_prefill)
    return is_exact, f"{text}; {_listed(unused)}" if unused else text


def _exactness(records: Sequence[WorkerRecord]) -> tuple[bool, str]:
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


def unused_kinds(records: Sequence[WorkerRecord], decode_may_prefill: bool) -> list[str]:
    """Returns which workers get no work, or little, because those of the other role compute differently.

    Exact workers pair with their own kind only, so a kind without one of the roles serves no whole request.
    """
    exact = {record.numerics.digest for record in records if record.exact}
    kinds: dict[str, list[WorkerRecord]] = {}  # all workers that are not exact pair with each other
    for record in records:
        if not record.draining:
            kinds.setdefault(record.numerics.digest if record.numerics.digest in exact else "", []).append(record)
    if len(kinds) < 2:  # what is missing is then missing in the whole cluster
        return []
    serves_all = decode_may_prefill and not any(record.role in PREFILL_ROLES for record in records)
    found = []
    for kind in kinds.values():
        roles, names = {record.role for record in kind}, _named([record.worker.worker_id for record in kind])
        if not roles & PREFILL_ROLES and not serves_all:
            work = "only prompts that decode workers compute themselves" if decode_may_prefill else "no work"
            found.append(f"{names} {_gets(kind)} {work}: no prefill worker computes alike, which --exact requires")
        elif not roles & DECODE_ROLES:
            work = "only prompts whose answer is one token"
            found.append(f"{names} {_gets(kind)} {work}: no decode worker computes alike, which --exact requires")
    return found


def _gets(kind: Sequence[WorkerRecord]) -> str:
    return "gets" if len(kind) == 1 else "get"


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
