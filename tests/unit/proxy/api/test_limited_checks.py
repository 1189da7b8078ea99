"""What a grammar's check takes is limited by the kernel, for all grammars of a request together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.messages.grammar import GrammarCheck
from tandem.proxy.api import grammar_checks
from tandem.proxy.api.grammar_checks import LimitedChecks
from tandem.proxy.api.structured_output import json_rule, lark_of
from tandem.runtime.errors import InternalError
from tests.support.hostile_grammars import CONJUNCTIONS

GOOD = lark_of(json_rule({"type": "object"}, False))


def spin(_text: str) -> GrammarCheck:
    while True:
        pass


def allocate(_text: str) -> GrammarCheck:
    os.abort() if not bytearray(64 << 20) else None
    return GrammarCheck()


def with_check(monkeypatch: pytest.MonkeyPatch, check: Callable[[str], GrammarCheck]) -> LimitedChecks:
    monkeypatch.setattr(grammar_checks, "check_grammar", check)
    monkeypatch.setattr(grammar_checks, "CHECKS_CPU_S", 0.2)
    monkeypatch.setattr(grammar_checks, "LAST_CPU_S", 0.1)
    return LimitedChecks()


def test_grammars_are_checked_in_one_process() -> None:
    with LimitedChecks() as check:
        assert check(GOOD) == GrammarCheck()
        sandbox = check._sandbox
        assert "unexpected" in check("start: (").error.lower() or check("start: (").error
        assert check(GOOD) == GrammarCheck() and check._sandbox is sandbox is not None
    assert not Path(f"/proc/{sandbox._child.pid}").exists()


def test_what_takes_too_long_is_ended_and_the_rest_of_the_request_has_a_short_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with with_check(monkeypatch, lambda text: spin(text) if text == "slow" else GrammarCheck()) as check:
        assert check("fast") == GrammarCheck()
        over = check("slow")
        assert over.is_over_time and "processor time" in over.error and "Send fewer" in over.error
        assert check("fast") == GrammarCheck()
        assert check("slow").is_over_time
        assert check("fast").is_over_time, "nothing is left"
        assert check._sandbox is None


def test_many_checks_have_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(_text: str) -> GrammarCheck:
        for _ in range(300_000):
            pass
        return GrammarCheck()

    with with_check(monkeypatch, take) as check:
        checks = [check(str(number)).is_over_time for number in range(500)]
    assert not checks[0] and checks[-1]


def test_crashes_are_errors_of_the_grammar_and_take_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(text: str) -> GrammarCheck:
        for _ in range(100_000):
            pass
        if text == "python":
            raise MemoryError
        signal.raise_signal(signal.SIGABRT if text == "memory" else signal.SIGSEGV)
        return GrammarCheck()

    with with_check(monkeypatch, crash) as check:
        assert "MiB of memory" in check("memory").error and check("python") == check("memory")
        assert "too deeply nested" in check("depth").error
        errors = [check("depth") for _ in range(200)]
        assert errors[-1].is_over_time


def test_a_check_whose_process_something_else_ends_is_tried_again_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def killed(text: str) -> GrammarCheck:
        if text == "always" or not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return GrammarCheck()

    with with_check(monkeypatch, killed) as check:
        assert check("once") == GrammarCheck()
        with pytest.raises(InternalError, match="was lost twice"):
            check("always")


@pytest.mark.parametrize("name", CONJUNCTIONS)
def test_patterns_that_all_apply_end_at_a_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit they take minutes, or gigabytes."""
    monkeypatch.setattr(grammar_checks, "CHECKS_CPU_S", 0.5)
    patterns = CONJUNCTIONS[name]
    schema: dict[str, Any] = {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}
    with LimitedChecks() as check:
        result = check(lark_of(json_rule(schema, False)))
    assert result.is_over_time or "memory" in result.error, result
