"""Tiers that fail below a serving cluster: requests are computed instead, and wrong bytes are never used."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.kv_transfer.tiers.block_record import FORMAT_VERSION
from tandem.kv_transfer.tiers.folder_index import VERSION_FOLDER
from tandem.protocol.messages.membership import TierFigures
from tests.support.cluster import Cluster
from tests.support.mooncake import MooncakeStore, freeze, mooncake_environment

pytestmark = pytest.mark.timeout(600)

PROMPT_TOKENS = 200
PROMPTS = range(10)
POOL_GIB = "0.005"  # less than the KV of all prompts
OPTIONS = ("--workers", "1", "--dtype", "float32", "--block-size", "16", "--kv-cache-gib", POOL_GIB)
MAX_DELAY_S = 20.0
"""More than a load may take (`LOAD_TIMEOUT_S`), and much less than a client's deadline."""


def ask(cluster: Cluster, timeout_s: float, **fields: Any) -> tuple[list[int], int]:
    """Returns the answer's tokens, and how many tokens of the prompt were cached or loaded."""
    answer = cluster.complete(timeout_s, **fields)
    [choice] = answer["choices"]
    return choice["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def prompt_of(number: int) -> list[int]:
    return [(number * 31 + 7 * position) % 900 + 4 for position in range(PROMPT_TOKENS)]


class TieredCluster:
    """A cluster of one worker with one tier, and its answers while the tier works."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._epoch = cluster.worker("worker-0").worker.epoch
        cluster.wait_for(lambda: bool(cluster.worker("worker-0").load.tiers))  # the first load report
        self._answers = {number: self.ask(number)[0] for number in PROMPTS}
        self.wait_until_loading()

    def ask(self, number: int) -> tuple[list[int], int]:
        return ask(self.cluster, MAX_DELAY_S, prompt=prompt_of(number), max_tokens=8)

    def tier(self) -> TierFigures:
        [tier] = self.cluster.worker("worker-0").load.tiers
        return tier

    def check_answers(self, numbers: Sequence[int] = PROMPTS) -> None:
        """The prompts are answered as before, by the same process."""
        assert [self.ask(number)[0] for number in numbers] == [self._answers[number] for number in numbers]
        assert self.cluster.worker("worker-0").worker.epoch == self._epoch

    def wait_until_loading(self) -> None:
        """Waits until the tier serves prompts (again)."""
        before = self.tier().num_loaded

        def is_loading() -> bool:
            self.check_answers()
            return self.tier().num_loaded > before

        self.cluster.wait_for(is_loading)


# ---- replaced workers


@pytest.mark.parametrize(("tier", "how"), [("disk", "killed"), ("host", "restarted")])
def test_the_next_turn_after_all_workers_were_replaced_is_loaded(tier: str, how: str, tmp_path: Path) -> None:
    """Killed at once, or restarted one by one as in an upgrade."""
    tiers = {"host": ("--kv-host-gib", "0.1"), "disk": ("--kv-disk-dir", str(tmp_path), "--kv-disk-gib", "0.1")}
    options = ("--dtype", "float32", "--block-size", "16", "--kv-cache-gib", "0.05", *tiers[tier])
    with Cluster(*options) as cluster:
        first = [11 * i % 900 + 4 for i in range(200)]
        num_blocks = len(first) // 16
        workers = ("prefill-0", "decode-0")

        def holds_first_turn() -> bool:
            loads = [cluster.worker(each).load for each in workers]
            return all(sum(tier.num_blocks for tier in load.tiers) >= num_blocks for load in loads)

        turn = [*first, *ask(cluster, 120, prompt=first, max_tokens=40)[0], *range(50, 100)]
        cluster.wait_for(holds_first_turn)
        before = [cluster.worker(each).worker for each in workers]
        if how == "killed":
            for worker in before:
                os.kill(worker.pid, signal.SIGKILL)
        else:
            assert cluster.run("restart").returncode == 0
        epochs = {worker.epoch for worker in before}
        cluster.wait_for(lambda: any(not epochs & set(pair) for pair in cluster.ready_pairs()), 120)
        cluster.wait_for(holds_first_turn)
        token_ids, num_cached = ask(cluster, 120, prompt=turn, max_tokens=40)
        assert num_cached >= num_blocks * 16
        computed = ask(cluster, 120, prompt=turn, max_tokens=40, cache_salt="computes the whole prompt")
        assert computed == (token_ids, 0)


# ---- disk


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 16 MiB."""
    path = tmp_path_factory.mktemp("disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount the file system that these tests fill")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="module")
def on_disk(disk: Path) -> Iterator[TieredCluster]:
    with Cluster(*OPTIONS, "--kv-disk-dir", str(disk / "kv"), "--kv-disk-gib", "0.1") as cluster:
        yield TieredCluster(cluster)


def block_files(disk: Path) -> list[Path]:
    return [path for path in (disk / "kv").rglob("*") if path.is_file()]


def test_wrong_bytes_on_disk_are_not_used(on_disk: TieredCluster, disk: Path) -> None:
    num_corrupt = on_disk.tier().num_corrupt
    for number, path in enumerate(block_files(disk)):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content if number % 2 else content[:-1])
    on_disk.check_answers()
    on_disk.cluster.wait_for(lambda: on_disk.tier().num_corrupt > num_corrupt)
    on_disk.wait_until_loading()


def test_a_full_disk_costs_the_cache_only(on_disk: TieredCluster, disk: Path) -> None:
    for path in block_files(disk):
        path.unlink()
    ballast = disk / "ballast"
    with pytest.raises(OSError, match="No space left"):
        ballast.write_bytes(bytes(32 << 20))

    def is_refused() -> bool:
        on_disk.check_answers()
        return "No space left" in on_disk.tier().error

    on_disk.cluster.wait_for(is_refused)
    ballast.unlink()
    on_disk.wait_until_loading()
    assert not on_disk.tier().error


def test_a_removed_folder_is_made_again(on_disk: TieredCluster, disk: Path) -> None:
    shutil.rmtree(disk / "kv")
    on_disk.check_answers()
    on_disk.wait_until_loading()
    assert block_files(disk)


# ---- Mooncake Store


@pytest.fixture(scope="module")
def store() -> Iterator[MooncakeStore]:
    with MooncakeStore() as running:
        yield running


def test_wrong_bytes_in_a_store_are_not_used(on_disk: TieredCluster, disk: Path, store: MooncakeStore) -> None:
    """Another client stores values under the keys of a prompt that the store does not have yet. A cluster with a disk
    tells the keys, which are its files' names. The cluster that reads them is new: it loads whatever the store has,
    while one that knows how fast the store is may compute instead. The first test of the store, because a frozen master
    may forget what it holds."""
    new_prompt = max(PROMPTS) + 1
    before = set(block_files(disk))
    expected, num_cached = on_disk.ask(new_prompt)
    assert num_cached == 0
    num_blocks = PROMPT_TOKENS // 16
    on_disk.cluster.wait_for(lambda: len(set(block_files(disk)) - before) >= num_blocks)
    records = {path.name: path for path in set(block_files(disk)) - before}
    [identity] = [path.name for path in (disk / "kv" / VERSION_FOLDER).iterdir()]
    size = next(iter(records.values())).stat().st_size
    store.put([f"tandem/v{FORMAT_VERSION}/{identity}/{name}" for name in records], b"x" * size)
    with Cluster(*OPTIONS, "--kv-store", f"mooncake://{store.address}", env=mooncake_environment()) as cluster:

        def tiers() -> list[TierFigures]:  # of the last load report; the first ones have none
            return cluster.worker("worker-0").load.tiers

        ask(cluster, MAX_DELAY_S, prompt=[5] * 100, max_tokens=8)
        cluster.wait_for(lambda: any(tier.num_stored for tier in tiers()))  # it is connected
        assert ask(cluster, MAX_DELAY_S, prompt=prompt_of(new_prompt), max_tokens=8) == (expected, 0)
        cluster.wait_for(lambda: any(tier.num_corrupt for tier in tiers()))


@pytest.fixture(scope="module")
def in_store(store: MooncakeStore) -> Iterator[TieredCluster]:
    with Cluster(*OPTIONS, "--kv-store", f"mooncake://{store.address}", env=mooncake_environment()) as cluster:
        yield TieredCluster(cluster)


def test_a_frozen_store_delays_and_fails_nothing(in_store: TieredCluster, store: MooncakeStore) -> None:
    freeze(store.master)
    in_store.check_answers()
    in_store.cluster.wait_for(lambda: bool(in_store.tier().error))
    store.master.send_signal(signal.SIGCONT)
    in_store.wait_until_loading()


def test_a_killed_store_fails_nothing(in_store: TieredCluster, store: MooncakeStore) -> None:
    store.master.kill()
    store.master.wait()
    in_store.check_answers()
    in_store.cluster.wait_for(lambda: bool(in_store.tier().error))
    store.start_master()
    in_store.wait_until_loading()
