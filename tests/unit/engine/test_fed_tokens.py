"""The order of work when rank 0's tokens go to the other ranks: two ranks on a device that runs work as late as it may.

The host never waits for a step here: a rank that used the tokens before they have arrived would compute with others.
"""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tandem.engine.batch import BatchItem
from tandem.engine.steps.launched_step import FedTokens, LaunchedStep
from tests.support.late_device import LateDevice, install
from tests.support.late_nccl import LateNCCL, LateWork, NCCLWorld

NUM_STEPS, NUM_SEQUENCES = 6, 4


class Ranks:
    """Both ranks. computed: the last step's tokens, by rank. expected: what they should be."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.device = LateDevice(seed)
        install(self.device, patch)
        world = NCCLWorld(self.device)
        options = SimpleNamespace(_timeout=timedelta(seconds=60))
        self.groups = [LateNCCL(world, "ranks", rank, options) for rank in (0, 1)]
        patch.setattr(dist, "get_rank", self._rank)
        patch.setattr(dist, "broadcast", self._broadcast)
        rng = random.Random(seed)
        self.expected = [rng.randrange(1000) for _ in range(NUM_SEQUENCES)]
        self._first = torch.tensor(self.expected)
        self._orders = [rng.sample(range(NUM_SEQUENCES), NUM_SEQUENCES) for _ in range(NUM_STEPS)]
        for order in self._orders:
            self.expected = [self.expected[sample] * 3 + 1 for sample in order]
        self.computed: dict[int, list[int]] = {}
        for rank in (0, 1):
            self.device.start(str(rank), lambda: self._run(), is_daemon=False)
        self.device.run()

    def _rank(self) -> int:
        actor = self.device.actor()
        assert actor is not None
        return int(actor.name)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Does not wait on the host, as with NCCL."""
        group = self.groups[self._rank()]
        work = group.send([tensor], 1, 0) if self._rank() == source else group.recv([tensor], source, 0)
        work.wait()

    def _run(self) -> None:
        with self.device.stream(self.device.Stream()):
            tokens = self._first
            for order in self._orders:
                sampled: Any = SimpleNamespace(token_ids=tokens, was_corrected=False)
                before = LaunchedStep((sampled, lambda tokens: []), lambda: None) if self._rank() == 0 else None
                fed = FedTokens([BatchItem([0], 0, [0], follows=sample) for sample in order], before, num_ranks=2)
                token_ids = torch.zeros(NUM_SEQUENCES, dtype=torch.int32)
                fed.put_into(token_ids, [torch.from_numpy(array) for array in fed.arrays])
                tokens = token_ids.long() * 3 + 1
            end = self.device.Event()
            end.record()
            end.synchronize()
        self.computed[self._rank()] = tokens.tolist()


@pytest.mark.parametrize("seed", range(30))
def test_every_rank_computes_with_the_tokens_of_rank_0(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(seed, monkeypatch)
    assert ranks.computed == {0: ranks.expected, 1: ranks.expected}


def test_a_stream_that_does_not_wait_for_the_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateWork, "wait", lambda work: None)
    found = [Ranks(seed, monkeypatch) for seed in range(30)]
    assert any(ranks.computed[1] != ranks.expected for ranks in found)


def test_a_rank_0_without_the_step_before_is_refused() -> None:
    fed = FedTokens([BatchItem([0], 0, [0], follows=0)], None)
    with pytest.raises(AssertionError, match="no step has sampled these tokens"):
        fed.put_into(torch.zeros(1, dtype=torch.int64), [torch.from_numpy(array) for array in fed.arrays])
