"""The load report has a figure for each field of the message."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from tandem.protocol.messages.membership import TierFigures, WorkerLoad
from tandem.worker import worker


def test_every_field_is_reported_and_tiers_have_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(worker, "WorkerLoad", lambda **fields: given.update(fields))
    scheduler, tiers = MagicMock(), MagicMock()
    scheduler.prefill.prompts.waiting_tokens.return_value = [(0, 5), (1, 7)]
    for part in (scheduler.prefill, scheduler.decode.reservations):
        part.num_prompt_tokens, part.num_cached_tokens = 3, 2
    scheduler.tiers.figures.return_value = [TierFigures("disk", num_blocks=4)]
    tiers.last_answer.return_value = MagicMock(num_bytes=10, max_bytes=20, num_corrupt=1, error="the disk is full")
    worker.load_report(scheduler, MagicMock(), MagicMock(), tiers, MagicMock(), 9)
    of_vllm = {"num_drafted_tokens", "num_accepted_tokens"}
    assert given.keys() == set(WorkerLoad.__struct_fields__) - of_vllm
    assert (given["num_waiting_tokens"], given["num_received_tokens"], given["num_role_changes"]) == (12, 1, 9)
    assert given["tiers"] == [TierFigures("disk", 4, 10, 20, num_corrupt=1, error="the disk is full")]


def test_figures_of_both_roles_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(worker, "WorkerLoad", lambda **fields: given.update(fields))
    scheduler = MagicMock()
    scheduler.prefill.prompts.waiting_tokens.return_value = []
    scheduler.prefill.num_finished, scheduler.decode.num_finished = 3, 40
    scheduler.prefill.num_prompt_tokens, scheduler.decode.reservations.num_prompt_tokens = 5, 60
    scheduler.prefill.num_cached_tokens, scheduler.decode.reservations.num_cached_tokens = 7, 20
    scheduler.decode.num_running, scheduler.decode.num_waiting = 9, 80
    worker.load_report(scheduler, MagicMock(), MagicMock(), MagicMock(), MagicMock(), 0)
    names = ("num_finished", "num_prompt_tokens", "num_cached_tokens", "num_decoding", "num_received_tokens")
    assert [given[name] for name in names] == [43, 65, 27, 89, 40]
