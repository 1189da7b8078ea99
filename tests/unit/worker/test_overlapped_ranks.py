"""Steps of two ranks overlap, one of them a real follower process: the same tokens as without overlap."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch.distributed as dist

from tandem.engine import tensor_parallel
from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.kv_pool import KVPool
from tandem.engine.loaded_model import LoadedModel
from tandem.engine.tensor_parallel import LeadingRunner, TensorParallelGroup
from tandem.protocol.messages.sampling import SamplingParams
from tandem.runtime.logs import LogSettings
from tandem.worker.follower import start_follower
from tests.unit.worker.test_step_loop import CountingRunner, check_overlap, every_sampling, save_model


class CountingLeader(CountingRunner, LeadingRunner):
    """Rank 0's runner, with counters."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TensorParallelGroup, LoadedModel, EngineConfig]]:
    config = msgspec.structs.replace(save_model(tmp_path_factory.mktemp("model")), tensor_parallel_size=2)
    lost: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setattr(tensor_parallel, "LeadingRunner", CountingLeader)
        group = TensorParallelGroup(
            "worker", config, "127.0.0.1", LogSettings(), start_follower, lambda reason, code: lost.append(reason)
        )
        yield group, group.load(), config
        group.close()
        dist.destroy_process_group()
    assert not lost


@pytest.mark.extended
@every_sampling
def test_overlapped_steps_of_two_ranks_give_the_same_tokens(
    ranks: tuple[TensorParallelGroup, LoadedModel, EngineConfig], samplings: list[SamplingParams]
) -> None:
    group, loaded, config = ranks
    runner = group.make_runner(loaded, KVPool(loaded, config))
    assert isinstance(runner, CountingLeader)
    check_overlap(runner, samplings)
