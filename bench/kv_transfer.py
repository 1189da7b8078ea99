"""Throughput of the CPU KV connectors between two processes, relative to the raw transport in the same run.

    python -m bench.kv_transfer [--connectors ipc,nixl,tcp,tls,gloo] [--quick] [--json FILE]

The raw transport of `ipc` is memmove into the peer's mapped memory; that of `gloo` is one send and receive of the whole
size; that of `tcp`, without keys and with them (`tls`), is one plain socket; that of `nixl`, which runs where NIXL is
installed, is one write request of NIXL for all blocks. Connectors move blocks of 1 MiB (64 tokens of a 1 B model),
adjacent in the pool or scattered, and announce every transfer to the receiving process as the workers do. Copying
scattered blocks is slower than copying one range, so scattered transfers of `ipc` and `nixl` are compared with a
scattered memmove or request. On one host NIXL copies from process to process; UCX_TLS=tcp makes it use sockets. GPUs:
`bench.gpu.kv_transfer`.
"""

from __future__ import annotations

import itertools
import statistics

import msgspec
import torch

from bench.kv_transfer_processes import BLOCK_BYTES, PrefillSide, both_sides
from bench.kv_transfer_references import Mode, modes_of, raw_of
from bench.support.report import Aim, Report, finish, new_parser, print_rows
from tandem.kv_transfer.registry import load_connector

MIB = 2**20
SIZES = (MIB, 16 * MIB, 64 * MIB, 256 * MIB)
PAIR_COUNTS = (1, 4)
ROUND_BYTES = 64 * MIB  # smaller transfers are repeated until a round moves this much per pair
STEADY_BYTES = 16 * MIB  # the aims apply from this size on
NUM_ROUNDS = 5
AIMS = {"ipc": 0.7, "nixl": 0.9, "tcp": 0.9, "tls": 0.6, "gloo": 0.85}


class Figure(msgspec.Struct, frozen=True):
    """`gb_per_s` and `ratio` (to raw in the same round) are medians over the rounds."""

    connector: str
    pairs: int
    size_bytes: int
    gb_per_s: dict[Mode, float]
    ratio: dict[Mode, float]
    receiver_cpu_ms_per_gib: dict[Mode, float]


def measure(side: PrefillSide, connector: str, num_pairs: int, size: int, num_rounds: int) -> Figure:
    modes = modes_of(connector)
    num_blocks, count = size // BLOCK_BYTES, max(1, ROUND_BYTES // size)
    num_bytes = size * count * num_pairs
    rates: dict[Mode, list[float]] = {mode: [] for mode in modes}
    cpu: dict[Mode, list[float]] = {mode: [] for mode in modes}
    for index in range(num_rounds + 1):
        turn = index % len(modes)  # rotates the order, so that no mode always follows the same one
        for mode in modes[turn:] + modes[:turn]:
            elapsed_s, cpu_s = side.run(mode, num_blocks, count)
            if index:  # the first round pays for page faults
                rates[mode].append(num_bytes / elapsed_s / 1e9)
                cpu[mode].append(1000 * cpu_s / (num_bytes / 2**30))
    return Figure(
        connector,
        num_pairs,
        size,
        gb_per_s={mode: statistics.median(rates[mode]) for mode in modes},
        ratio={
            mode: statistics.median(a / b for a, b in zip(rates[mode], rates[raw_of(connector, mode)], strict=True))
            for mode in modes[-2:]
        },
        receiver_cpu_ms_per_gib={mode: statistics.median(cpu[mode]) for mode in modes},
    )


def aims(figures: list[Figure]) -> list[Aim]:
    return [
        Aim.of(
            f"{f.connector}, {f.pairs} pair(s), {f.size_bytes // MIB} MiB, {mode}: rate / {raw_of(f.connector, mode)}",
            ratio,
            AIMS[f.connector],
            "higher",
        )
        for f in figures
        for mode, ratio in f.ratio.items()
        if f.size_bytes >= STEADY_BYTES
    ]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--connectors", default="", help="comma-separated (default: all that are installed)")
    options = parser.parse_args()
    installed = [name for name in AIMS if name == "tls" or "cpu" in load_connector(name).devices]
    connectors = options.connectors.split(",") if options.connectors else installed
    if unknown := set(connectors) - set(AIMS):
        parser.error(f"unknown connector {', '.join(sorted(unknown))}; choose from {', '.join(AIMS)}")
    if missing := set(connectors) - set(installed):
        parser.error(f"{', '.join(missing)} is not installed")
    torch.set_num_threads(1)
    sizes = [size for size in SIZES if not options.quick or size <= STEADY_BYTES]
    figures = []
    for connector, num_pairs in itertools.product(connectors, PAIR_COUNTS):
        with both_sides(connector, num_pairs, max(sizes)) as side:
            num_rounds = 2 if options.quick else NUM_ROUNDS
            figures += [measure(side, connector, num_pairs, size, num_rounds) for size in sizes]
    print_rows(
        [
            {"connector": f.connector, "pairs": f.pairs, "MiB": f.size_bytes // MIB}
            | {f"{mode} GB/s": rate for mode, rate in f.gb_per_s.items()}
            | {f"{mode} / raw": ratio for mode, ratio in f.ratio.items()}
            for f in figures
        ]
    )
    finish(Report.of("kv_transfer", {"transfers": figures}, aims(figures)), options.json)


if __name__ == "__main__":
    main()
