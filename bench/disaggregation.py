"""Cost of separating prefill from decode, in a real cluster with one worker of each role.

    python -m bench.disaggregation [--quick] [--json FILE]

For prompts of 256, 1,024 and 4,096 tokens without a common prefix, one request at a time, it measures:

- the time from the first token to the second, compared with a later decode step plus the bare transport's time for the
  KV of the last chunk, which cannot overlap with compute;
- TTFT, compared with a request for one token, which ships no KV.

Then it measures the gaps of a running stream while prefill computes prompts back to back: without shipping them
("prefill"), shipping each one, which then joins decode's batch for a step ("prefill and transfer"), and with the same
number of such steps for a prompt that decode has cached ("prefill and steps"), so that only the transfer differs. The
model is small but has 16 KiB of KV per token, as much as a 1 B model, so transfers weigh more here than in practice.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.kv_transfer_processes import raw_transfer_ms
from bench.support.report import Aim, Report, finish, new_parser, print_rows
from bench.support.servers import server, tandem
from bench.support.stream_client import StreamClient
from tests.support.noise_model import write_dummy_model
from tests.support.ports import free_port

LENGTHS = (256, 1024, 4096)
CHUNK = 512
MODEL_CONFIG: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip
KV_BYTES_PER_TOKEN = 8 * 2 * 8 * 64 * 2
KV_CACHE_GIB = 0.5
OUTPUT_TOKENS = 12
LOAD_TOKENS = 1024
STREAM_TOKENS = 400
LOADS = ("alone", "prefill", "prefill and steps", "prefill and transfer")


@contextlib.contextmanager
def cluster(connector: str) -> Iterator[str]:
    """Yields the URL of a cluster of one prefill and one decode worker with one thread each."""
    with tempfile.TemporaryDirectory() as folder:
        model, port = Path(folder) / "model", free_port()
        write_dummy_model(model, **MODEL_CONFIG)
        command = tandem(
            model, port, "--load-format", "dummy", "--dtype", "bfloat16", "--kv-cache-gib", str(KV_CACHE_GIB),
            "--kv-connector", connector, "--max-num-batched-tokens", str(CHUNK), "--threads-per-worker", "1",
        )  # fmt: skip
        with server(command, port):
            yield f"http://127.0.0.1:{port}"


def warm_up(client: StreamClient) -> None:
    """Uses every block of both pools once: the first use of a memory page costs more than the copy into it."""
    num_tokens = int(KV_CACHE_GIB * 2**30) // KV_BYTES_PER_TOKEN
    for _ in range(num_tokens // max(LENGTHS) + 1):
        client.stream(max(LENGTHS), 2)


def measure_length(client: StreamClient, connector: str, length: int, num_rounds: int) -> dict[str, float]:
    firsts, excesses, steps, ttfts, ttfts_alone = [], [], [], [], []
    for index in range(num_rounds + 1):
        alone, both = 0.0, []
        for kind in ("alone", "both") if index % 2 else ("both", "alone"):
            if kind == "alone":
                (alone,) = client.stream(length, 1)
            else:
                both = client.stream(length, OUTPUT_TOKENS)
        if index == 0:
            continue
        step = statistics.median(b - a for a, b in itertools.pairwise(both[1:]))
        firsts.append(both[1] - both[0])
        steps.append(step)
        excesses.append(both[1] - both[0] - step)
        ttfts.append(both[0])
        ttfts_alone.append(alone)
    last_chunk = length % CHUNK or CHUNK
    return {
        "first_to_second_ms": 1000 * statistics.median(firsts),
        "decode_step_ms": 1000 * statistics.median(steps),
        "beyond_a_step_ms": 1000 * statistics.median(excesses),
        "bare_last_chunk_ms": raw_transfer_ms(connector, last_chunk * KV_BYTES_PER_TOKEN),
        "ttft_ms": 1000 * statistics.median(ttfts),
        "ttft_cost_ms": 1000 * (statistics.median(ttfts) - statistics.median(ttfts_alone)),
        "ttft_cost_of_fastest_ms": 1000 * (min(ttfts) - min(ttfts_alone)),
    }


def measure_load(url: str, num_rounds: int) -> dict[str, float]:
    """Returns the mean gap of a running stream in ms, by the load beside it; see the module's docstring."""
    gaps: dict[str, list[float]] = {kind: [] for kind in LOADS}
    for index in range(num_rounds):
        first = index % len(LOADS)
        for kind in LOADS[first:] + LOADS[:first]:
            stop = threading.Event()
            loader = threading.Thread(target=load, args=(url, kind, stop))
            loader.start()
            try:
                times = StreamClient(url).stream(16, STREAM_TOKENS)
            finally:
                stop.set()
                loader.join()
            gaps[kind].append((times[-1] - times[1]) / (len(times) - 2))
    means = {kind: 1000 * statistics.median(values) for kind, values in gaps.items()}
    pairs = zip(gaps["prefill and transfer"], gaps["prefill and steps"], strict=True)
    return {**means, "transfer / none": statistics.median(a / b for a, b in pairs)}


def load(url: str, kind: str, stop: threading.Event) -> None:
    client = StreamClient(url)
    held = client.random_prompt(LOAD_TOKENS)
    if kind == "prefill and steps":
        client.complete(held, 2)
    while kind != "alone" and not stop.is_set():
        client.stream(LOAD_TOKENS, 2 if kind == "prefill and transfer" else 1)
        if kind == "prefill and steps":
            client.complete(held, 2)


def aims(figures: dict[str, Any]) -> list[Aim]:
    found = []
    for connector, of_connector in figures.items():
        for length, f in of_connector["prompts"].items():
            name, allowed = f"{connector}, {length} tokens", 5 + f["bare_last_chunk_ms"]
            found += [
                Aim.of(
                    f"{name}: first to second token, ms beyond a decode step", f["beyond_a_step_ms"], allowed, "lower"
                ),
                Aim.of(f"{name}: TTFT, ms beyond prefill alone", f["ttft_cost_ms"], 5, "lower"),
            ]
        ratio = of_connector["decode step ms under load"]["transfer / none"]
        found.append(Aim.of(f"{connector}: decode step with transfers / without", ratio, 1.1, "lower"))
    return found


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--connectors", default="ipc,gloo", help="comma-separated (default: %(default)s)")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for connector in options.connectors.split(","):
        with cluster(connector) as url:
            client = StreamClient(url)
            warm_up(client)
            figures[connector] = {
                "prompts": {str(n): measure_length(client, connector, n, 3 if options.quick else 30) for n in LENGTHS},
                "decode step ms under load": measure_load(url, 1 if options.quick else 5),
            }
    for connector, found in figures.items():
        print_rows([{"connector": connector, "prompt": n, **row} for n, row in found["prompts"].items()])
        print_rows([found["decode step ms under load"]])
    finish(Report.of("disaggregation", figures, aims(figures)), options.json)


if __name__ == "__main__":
    main()
