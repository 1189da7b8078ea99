"""What the masks of a step cost each client."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.batch import Sample
from tandem.engine.sampling import grammar as grammar_module
from tandem.engine.sampling import grammar_mask
from tandem.engine.sampling.grammar import LOST, Grammar, GrammarState, copy_of
from tandem.engine.sampling.grammar_mask import StepMask, compute_masks
from tandem.engine.sampling.grammar_messages import Mask
from tandem.protocol.messages.sampling import SamplingParams
from tests.unit.engine.sampling.small_grammars import done

FINE = Mask(bytes(4), cpu_s=0.001)


class FakeProcess:
    """Starts in `start_s`. answers: seconds that each mask takes, and the mask; None if the process ends."""

    def __init__(self, answers: Sequence[tuple[float, Mask | None]], start_s: float = 0.0) -> None:
        self.now = 0.0
        self.budgets_s: list[float] = []
        self._answers = list(answers)
        self._start_s = start_s
        self._has_started = False
        self.error: Exception | None = None
        """Raised by a process that must be started."""

    def send(self, requests: Any, ended_state_ids: list[int], timeout_s: float, budget_s: float) -> None:
        if self.error is not None and not self._has_started:
            raise self.error
        self.now += 0.0 if self._has_started else self._start_s
        self._has_started = True
        self.budgets_s.append(budget_s)

    def receive(self, timeout_s: float) -> Mask | None:
        seconds, mask = self._answers.pop(0)
        self.now += seconds
        return mask

    def close(self) -> None:
        self._has_started = False


def masks_of(
    process: FakeProcess, monkeypatch: pytest.MonkeyPatch, budgets_s: dict[str, float]
) -> tuple[StepMask, list[GrammarState]]:
    """Computes a mask for each client, of one grammar."""
    for module in (grammar_module, grammar_mask):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: process.now))
    grammar = Grammar(done(process))
    states = [grammar.new_state({0}, client=client) for client in budgets_s]
    samples = [Sample(SamplingParams(), grammar=state) for state in states]
    return compute_masks(samples, list(range(len(samples))), budgets_s=budgets_s), states


def test_a_process_that_ends_costs_its_client_what_the_step_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot say what it has taken. Without the cost a client with new grammars makes every step wait."""
    process = FakeProcess([(0.0, FINE), (0.0, FINE), (0.3, None)], start_s=2.0)
    process._has_started = True
    mask, states = masks_of(process, monkeypatch, {"a": 1.0, "b": 1.0, "slow": 1.0})
    assert set(mask.errors) == {2} and mask.rows == [0, 1]
    assert mask.cpu_s == pytest.approx({"a": 0.001, "b": 0.001, "slow": 0.3})
    assert states[0].grammar.mask_s == pytest.approx(0.001), "what others of the grammar are expected to take"

    process = FakeProcess([(0.0, FINE), (0.3, None), (0.0, FINE)], start_s=2.0)
    process._has_started = True
    mask, states = masks_of(process, monkeypatch, {"a": 1.0, "slow": 1.0, "b": 1.0})
    assert set(mask.errors) == {1} and mask.rows == [0, 2]
    assert mask.cpu_s == pytest.approx({"a": 0.001, "slow": 2.3, "b": 0.001})
    assert states[0].grammar.has_ended


def test_sequences_for_which_a_lost_process_leaves_no_time_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine its loss and the start of the next one take as long as a step waits. They are innocent."""
    clients = {"slow": 9.0, "a": 9.0, "b": 9.0}
    process = FakeProcess([(0.3, None), (2.8, None)])
    process._has_started = True
    mask, states = masks_of(process, monkeypatch, clients)
    assert set(mask.errors) == {0} and mask.late == {1, 2}
    assert mask.cpu_s == pytest.approx({"slow": 0.3, "a": 2.8, "b": 0.0})
    assert states[1].num_late == 1

    process = FakeProcess([(3.1, None)])  # the new one cannot start in time
    process._has_started = True
    process.error = copy_of(LOST)
    mask, _ = masks_of(process, monkeypatch, clients)
    assert set(mask.errors) == {0} and mask.late == {1, 2}

    process = FakeProcess([(0.3, None), (0.3, None)])  # each ends by itself
    process._has_started = True
    mask, _ = masks_of(process, monkeypatch, clients)
    assert set(mask.errors) == {0, 1, 2} and not mask.late


def test_a_process_that_is_started_in_a_step_costs_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, _ = masks_of(FakeProcess([(0.0, FINE)], start_s=2.0), monkeypatch, {"a": 1.0})
    assert mask.cpu_s == pytest.approx({"a": 2.001})
    mask, _ = masks_of(FakeProcess([(0.0, FINE)], start_s=0.002), monkeypatch, {"a": 1.0})
    assert mask.cpu_s == pytest.approx({"a": 0.001}), "sending takes a little while, too"


def test_a_client_with_little_left_does_not_make_others_of_its_grammar_late(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeProcess([(0.0, FINE)] * 2)
    masks_of(process, monkeypatch, {"poor": 0.0001, "rich": 0.04})
    assert process.budgets_s == [0.04]
