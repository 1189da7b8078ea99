"""Defaults by device, and how many ranks share a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.deploy.cli import _parser
from tandem.deploy.cluster_config import ClusterConfig, load_config
from tandem.deploy.device_defaults import ranks_per_gpu, with_device_defaults
from tandem.deploy.processes.gpus import least_used
from tandem.runtime.errors import ConfigError


def test_settings_that_are_0_follow_the_device_and_others_stay() -> None:
    given = ClusterConfig(max_num_seqs=7)
    on_cpu, on_gpus = with_device_defaults(given, False), with_device_defaults(given, True)
    assert (on_cpu.max_num_seqs, on_gpus.max_num_seqs) == (7, 7)
    for name in ("max_num_batched_tokens", "max_waiting_requests"):
        assert 0 < getattr(on_cpu, name) < getattr(on_gpus, name)
    assert with_device_defaults(ClusterConfig(), True).max_num_seqs > with_device_defaults(given, True).max_num_seqs


@given(
    num_gpus=st.integers(2, 9),
    counts=st.fixed_dictionaries(
        {"prefill": st.integers(0, 5), "decode": st.integers(0, 5), "workers": st.integers(0, 5)}
    ),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_no_gpu_has_more_ranks_than_its_memory_is_divided_among(
    num_gpus: int, counts: dict[str, int], sizes: tuple[int, int]
) -> None:
    config = ClusterConfig(
        prefill=counts["prefill"], decode=counts["decode"], workers=counts["workers"],
        prefill_tensor_parallel_size=sizes[0], decode_tensor_parallel_size=sizes[1],
    )  # fmt: skip
    used: Counter[str] = Counter()
    gpus = [f"GPU-{number}" for number in range(num_gpus)]
    for role, count in config.counts.items():
        for _ in range(count):
            used.update(least_used(gpus, used, config.num_ranks(role)))
    assert max(used.values(), default=1) == ranks_per_gpu(config, num_gpus)


def test_block_size_is_auto_or_a_number() -> None:
    assert ClusterConfig().block_size == "auto"
    for text, value in (("auto", "auto"), ("32", 32)):
        assert _parser().parse_args(["up", "--block-size", text]).block_size == value
    with pytest.raises(ConfigError, match="block-size"):
        _parser().parse_args(["up", "--block-size", "large"])
    with pytest.raises(ConfigError, match="--block-size 4: "):
        load_config(None, {"block_size": 4})


def test_steps_of_a_few_prompt_tokens_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('block_size = "auto"\nmax_num_batched_tokens = 15\n')
    with pytest.raises(ConfigError, match="max_num_batched_tokens: 15 is less than 16"):
        load_config(file, {})
