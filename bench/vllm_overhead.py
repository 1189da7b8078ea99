"""One vLLM worker behind Tandem, and `vllm serve`, on the same cores in turn, under vLLM's own client and seed.

    python -m bench.vllm_overhead --vllm VENV --model FOLDER [--rate 2 --rounds 3]

Both run the same version of vLLM without compilation, with bfloat16, a model length of 4,096 and 2 GiB of KV cache.
With `--pair`, also two workers behind Tandem, as prefill and decode and as elastic ones, and vLLM's own pair over NIXL,
which starves on two cores at times and has no figures then.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from statistics import median

from bench.side_by_side import CLIENT_TIMEOUT_S, WARM_UP_REQUESTS, load
from bench.support.report import Aim, Report, finish, log, new_parser, print_rows
from bench.support.servers import add_vllm_option, complete, server, tandem, vllm_pair, vllm_serve

SHAPE = (256, 64)
"""Tokens of a prompt and of its answer."""


def main() -> None:
    parser = new_parser(__doc__)
    add_vllm_option(parser, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rate", default="2", help="requests per second")
    parser.add_argument("--rounds", type=int, default=3, help="the servers take turns this many times")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--pair", action="store_true", help="pairs, too")
    parser.add_argument("--port", type=int, default=8330)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.num_prompts = 1, 8
    rounds = [one_round(options, number) for number in range(1, options.rounds + 1)]
    print_rows([{"server": name, **values} for each in rounds for name, values in each.items()])
    finish(Report.of("vllm_overhead", {"rounds": rounds}, aims(rounds)), options.json)


def one_round(options: argparse.Namespace, number: int) -> dict[str, dict[str, float]]:
    """Returns `side_by_side.FIGURES` by server. No two rounds have the same prompts."""
    flags = [
        "--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-gib", "2",
        "--engine", "vllm", "--engine-python", str(options.vllm / "bin" / "python"),
    ]  # fmt: skip
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "vllm": vllm_serve(options.vllm, options.model, options.port, "--enforce-eager"),
        "tandem": (tandem(options.model, options.port, *flags, "--workers", "1"), {}),
    }
    if options.pair:
        commands["tandem_pair"] = tandem(options.model, options.port, *flags), {}
        commands["tandem_elastic"] = tandem(options.model, options.port, *flags, "--workers", "2"), {}
        commands["vllm_pair"] = vllm_pair(options.vllm, options.model, options.port), {}
    figures = {}
    for name, (command, env) in commands.items():
        with server(command, options.port, env):
            for i in range(WARM_UP_REQUESTS):
                complete(options.port, [i + 3] * SHAPE[0], 16)
            log(f"round {number}, {name}: {options.num_prompts} requests at {options.rate}/s")
            try:
                figures[name] = load(options, options.rate, options.num_prompts, *SHAPE, number)
            except subprocess.TimeoutExpired:
                log(f"{name} has not answered all requests within {CLIENT_TIMEOUT_S:.0f} s: no figures")
    return figures


def aims(rounds: list[dict[str, dict[str, float]]]) -> list[Aim]:
    def ratio(name: str) -> float:
        return median(each["tandem"][name] / each["vllm"][name] for each in rounds)

    return [
        Aim.of("mean TTFT, vLLM behind Tandem / vLLM", ratio("mean_ttft_ms"), 1.05, "lower"),
        Aim.of("mean TPOT, vLLM behind Tandem / vLLM", ratio("mean_tpot_ms"), 1.05, "lower"),
        Aim.of("output tokens/s, vLLM behind Tandem / vLLM", ratio("output_throughput"), 0.97, "higher"),
    ]


if __name__ == "__main__":
    main()
