"""One vLLM worker behind Tandem, and `vllm serve`, on the same cores in turn, under vLLM's own client and seed.

    python -m bench.vllm_overhead --peers FOLDER --vllm VENV --model FOLDER [--rates 2,4 --rounds 3]

Both run the same version of vLLM without compilation, with bfloat16, a model length of 4,096 and 2 GiB of KV cache.
With `--pair`, also a prefill and a decode worker of vLLM behind Tandem and vLLM's own pair over NIXL.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from bench.side_by_side import WARM_UP_REQUESTS, load
from bench.support.report import Aim, Report, finish, log, new_parser, print_rows
from bench.support.servers import add_vllm_options, complete, server, tandem, vllm

SHAPE = (256, 64)
"""Tokens of a prompt and of its answer."""


def main() -> None:
    parser = new_parser(__doc__)
    add_vllm_options(parser, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rates", default="2,4", help="requests per second, comma-separated")
    parser.add_argument("--rounds", type=int, default=3, help="the servers take turns this many times")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--pair", action="store_true", help="pairs, too")
    parser.add_argument("--port", type=int, default=8330)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.num_prompts = 1, 8
    rounds: list[dict[str, dict[str, Any]]] = [one_round(options, number) for number in range(options.rounds)]
    figures = {name: medians([each[name] for each in rounds]) for name in rounds[0]}
    print_rows(
        [
            {"server": name, "requests/s": rate, **values}
            for name, by_rate in figures.items()
            for rate, values in by_rate.items()
        ]
    )
    finish(Report.of("vllm_overhead", {"medians": figures, "rounds": rounds}, aims(figures)), options.json)


def one_round(options: argparse.Namespace, number: int) -> dict[str, dict[str, Any]]:
    """Returns FIGURES by server and rate."""
    flags = [
        "--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-gib", "2",
        "--engine", "vllm", "--engine-python", str(options.vllm / "bin" / "python"),
    ]  # fmt: skip
    commands = {
        "vllm": [*vllm(options, "vllm_single.sh", options.model, options.port), "--enforce-eager"],
        "tandem": tandem(options.model, options.port, *flags, "--workers", "1"),
    }
    if options.pair:
        commands["vllm_pair"] = vllm(options, "vllm_pd.sh", options.model, options.port)
        commands["tandem_pair"] = tandem(options.model, options.port, *flags)
        commands["tandem_elastic"] = tandem(options.model, options.port, *flags, "--workers", "2")
    figures: dict[str, dict[str, Any]] = {}
    for name, command in commands.items():
        with server(command, options.port):
            for i in range(WARM_UP_REQUESTS):
                complete(options.port, [i + 3] * SHAPE[0], 16)
            for rate in options.rates.split(","):
                log(f"round {number + 1}, {name}: {options.num_prompts} requests at {rate}/s")
                seed = 1 + number
                figures.setdefault(name, {})[rate] = load(options, rate, options.num_prompts, *SHAPE, seed)
    return figures


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        rate: {name: round(statistics.median(each[rate][name] for each in rounds), 2) for name in rounds[0][rate]}
        for rate in rounds[0]
    }


def aims(figures: dict[str, dict[str, Any]]) -> list[Aim]:
    wanted = []
    for rate in figures["tandem"]:

        def ratio(name: str, rate: str = rate) -> float:
            return float(figures["tandem"][rate][name] / figures["vllm"][rate][name])

        where = f"at {rate} requests/s, vLLM behind Tandem / vLLM"
        wanted += [
            Aim.of(f"mean TTFT {where}", ratio("mean_ttft_ms"), 1.05, "lower"),
            Aim.of(f"mean TPOT {where}", ratio("mean_tpot_ms"), 1.05, "lower"),
            Aim.of(f"output tokens/s {where}", ratio("output_throughput"), 0.97, "higher"),
        ]
    return wanted


if __name__ == "__main__":
    main()
