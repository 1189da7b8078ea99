"""Time of one routing decision with 64 prefill and 64 decode workers and prompts of up to 2,048 blocks.

    python -m bench.router_decisions [--quick] [--json FILE]

Hashing a prompt is measured apart: it happens once, where the prompt is tokenised.
"""

from __future__ import annotations

import json
import random
import time
import typing
from statistics import median
from typing import Literal

from bench.support.report import Aim, Report, finish, new_parser
from tandem.engine.kv_cache.prefix_log import PrefixLog
from tandem.protocol.messages.membership import (
    PROTOCOL_VERSION,
    PairChanges,
    PairStatus,
    RegisterWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.prefix_hash import BlockHasher, pack_short_hashes, unpack_short_hashes
from tandem.proxy.cluster.router import PromptShape, Router
from tandem.proxy.cluster.worker_table import WorkerTable

NUM_WORKERS = 64
BLOCK_SIZE = 64
AIM_US = 50.0

Spread = Literal["none", "few", "all"]
"""Workers that cache a prefix of the prompts. `few`: all hold the first quarter (a system prompt) and about three hold
more, as in a conversation. `all`: each holds a prefix of another length, which is the worst case."""


def build(num_workers: int, rng: random.Random, prompts: list[list[bytes]], spread: Spread) -> WorkerTable:
    table = WorkerTable(2.5, decode_may_prefill=True)
    prefills = [WorkerInfo(f"prefill-{i}", f"p{i}", "prefill", "", i) for i in range(num_workers)]
    decodes = [WorkerInfo(f"decode-{i}", f"d{i}", "decode", "", i) for i in range(num_workers)]
    for info in prefills + decodes:
        table.on_register(0, RegisterWorker(PROTOCOL_VERSION, info, 1 << 18, 50_000, "m", BLOCK_SIZE))
    pairs = [PairStatus(info.worker_id, info.epoch, "ready") for info in decodes]
    for info in prefills + decodes:
        log = PrefixLog(max_published=100_000, max_per_update=100_000)
        for hashes in prompts if spread != "none" else []:
            num_held = len(hashes) // 4
            if spread == "all" or rng.random() < 3 / (2 * num_workers):
                num_held = rng.randrange(len(hashes) + 1)
            for block_hash in hashes[:num_held]:
                log.add(block_hash)
        load = WorkerLoad(
            num_running=rng.randrange(40),
            num_blocks=10_000,
            num_free_blocks=rng.randrange(5_000, 10_000),
            waiting_tokens=[(0, rng.randrange(20_000))],
            prompt_tokens_per_s=rng.uniform(8_000, 12_000),
        )
        mine = PairChanges(0, pairs if info.role == "prefill" else [])
        table.on_status(0, WorkerStatus(info.worker_id, info.epoch, info.role, load, mine, log.take()))
    return table


def measure(num_tokens: int, spread: Spread, num_decisions: int) -> dict[str, object]:
    rng = random.Random(0)
    hasher = BlockHasher(BLOCK_SIZE, "m")
    packed = [pack_token_ids([rng.randrange(50_000) for _ in range(num_tokens)]) for _ in range(8)]
    started = time.perf_counter()
    prompts = [hasher.prompt_hashes(ids) for ids in packed]
    hashing_us = (time.perf_counter() - started) / len(packed) * 1e6
    table = build(NUM_WORKERS, rng, prompts, spread)
    router = Router(table, decode_prefill_threshold=32, num_proxies=4, rng=rng)
    wire = [pack_short_hashes(hashes) for hashes in prompts]
    times = []
    for number in range(num_decisions):
        short = wire[number % len(wire)]
        started = time.perf_counter()
        route = router.pick(PromptShape(num_tokens, hashes=unpack_short_hashes(short)))
        times.append((time.perf_counter() - started) * 1e6)
        router.prefill_ended(route)
        router.sequence_ended(route)
    times.sort()
    return {
        "prefill_workers": NUM_WORKERS,
        "decode_workers": NUM_WORKERS,
        "num_tokens": num_tokens,
        "num_blocks": num_tokens // BLOCK_SIZE,
        "prefixes": spread,
        "decision_us_median": round(median(times), 1),
        "decision_us_p99": round(times[int(0.99 * len(times))], 1),
        "hashing_us": round(hashing_us, 1),
    }


def main() -> None:
    parser = new_parser(__doc__)
    arguments = parser.parse_args()
    rows = [
        measure(num_tokens, spread, 200 if arguments.quick else 4000)
        for num_tokens in (64, 2048, 32_768, 131_072)
        for spread in typing.get_args(Spread)
    ]
    for row in rows:
        print(json.dumps(row))
    aims = []
    for spread in typing.get_args(Spread):
        worst = max(float(str(row["decision_us_median"])) for row in rows if row["prefixes"] == spread)
        aims.append(Aim.of(f"median decision in us, prefixes cached by: {spread}", worst, AIM_US, "lower"))
    finish(Report.of("router_decisions", {"rows": rows}, aims), arguments.json)


if __name__ == "__main__":
    main()
