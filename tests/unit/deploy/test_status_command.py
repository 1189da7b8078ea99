"""`tandem status` prints tables that fit a terminal."""

from __future__ import annotations

import msgspec
from rich.console import Console

from tandem.deploy.commands.status import status_tables
from tandem.protocol.messages.membership import (
    PairStatus,
    PairTraffic,
    Role,
    StatusReport,
    WorkerInfo,
    WorkerLoad,
    WorkerReport,
)

PREFILL = WorkerReport(
    WorkerInfo("prefill-0", "p", "prefill", "ipc://p", 11),
    WorkerLoad(num_blocks=8, traffic=[PairTraffic("decode-0", 4_000_000, 2.0)]),
    [PairStatus("decode-0", "d", "ready", "ipc")],
    0.1,
)
DECODE = WorkerReport(
    WorkerInfo("decode-0", "d", "decode", "ipc://d", 12), WorkerLoad(num_blocks=8, num_free_blocks=6), [], 0.2
)


def shown(*workers: WorkerReport, num_silent: int = 0) -> str:
    """Returns what a terminal of 80 columns shows of these workers."""
    console = Console(width=80, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(status_tables([StatusReport("a", "m", True, 2, list(workers))], num_silent))
    return captured.get()


def test_the_tables_fit_80_columns() -> None:
    text = shown(PREFILL, DECODE)
    assert max(map(len, text.splitlines())) <= 80
    for words in ("m: ready", "1 proxy, 2 requests in flight", "prefill-0", "decode-0", "25%", "ipc", "4.0"):
        assert words in text, words


def test_a_proxy_that_does_not_answer_is_counted() -> None:
    assert "m: not ready, 1 proxy (2 more do not answer)" in shown(PREFILL, num_silent=2)


def test_the_table_of_workers_shows_current_roles_and_flips() -> None:
    roles: list[tuple[Role, int]] = [("decode", 13), ("any", 0)]
    elastic = [
        WorkerReport(
            WorkerInfo(f"worker-{number}", f"e{number}", role, "ipc://w", 4_000_000 + number),
            WorkerLoad(num_blocks=4096, num_free_blocks=1024, num_role_changes=flips),
            [PairStatus(f"worker-{1 - number}", f"e{1 - number}", "ready", "ipc")],
            0.1,
        )
        for number, (role, flips) in enumerate(roles)
    ]
    text = shown(*elastic)
    assert max(map(len, text.splitlines())) <= 80
    assert [line.split()[:3] for line in text.splitlines() if line.startswith("worker-") and "%" in line] == [
        ["worker-1", "any", "4000001"],
        ["worker-0", "decode", "(13)"],
    ]


def test_the_status_shows_the_length_that_all_workers_take_and_their_blocks() -> None:
    def limits(prefill_len: int, decode_len: int, decode_block: int, quantization: str = "") -> str:
        return shown(
            msgspec.structs.replace(PREFILL, max_model_len=prefill_len, block_size=64, quantization=quantization),
            msgspec.structs.replace(DECODE, max_model_len=decode_len, block_size=decode_block),
        ).replace("\n", " ")

    assert "sequences of up to 4096 tokens, KV blocks of 64 tokens" in limits(4096, 4096, 64)
    assert "sequences of up to 2048 tokens (limit of decode-0), KV blocks of 16 or 64" in limits(4096, 2048, 16)
    assert "weights" not in limits(4096, 4096, 64)
    assert "KV blocks of 64 tokens, weights: gptq int4 or no quantisation" in limits(4096, 4096, 64, "gptq int4")
