"""`tandem simulate --trace`: traces are read, played on the real code, and summed up."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tandem.deploy.cli import main
from tandem.deploy.planning.player import Played, Player, TraceRequest, prompt_of, spread_ms
from tandem.deploy.planning.trace import MAX_REQUESTS, read_trace
from tandem.deploy.planning.worker_figures import WorkerFigures, planned_shape, read_figures
from tandem.engine.steps.step_times import StepTimes
from tandem.protocol.messages.membership import PairTraffic, Role, StatusReport, WorkerInfo, WorkerLoad, WorkerReport
from tandem.runtime.errors import ConfigError
from tandem.simulator.scenario import ClusterShape, cluster_config

FIGURES = WorkerFigures(
    prompt_tokens_per_s=2000.0, fixed_step_s=0.02, step_s_per_sequence=0.002, num_blocks=400, block_size=16,
    max_model_len=2048,
)  # fmt: skip
Layout = dict[str, int]
ONE_ELASTIC, TWO_ELASTIC = ({"prefill": 0, "decode": 0, "workers": number} for number in (1, 2))
PAIR = {"prefill": 1, "decode": 1}
LAYOUTS = [ONE_ELASTIC, TWO_ELASTIC, PAIR]


def shape_of(figures: WorkerFigures, **settings: int) -> ClusterShape:
    return planned_shape(figures, cluster_config(max_num_batched_tokens=512, max_num_seqs=64, **settings))


def play(trace: list[TraceRequest], layout: Layout, **settings: int) -> Played:
    return Player(trace, shape_of(FIGURES, **layout, **settings)).play()


def write(folder: Path, *lines: str) -> Path:
    file = folder / "trace"
    file.write_text("\n".join(lines) + "\n")
    return file


# ---- traces


def test_a_log_of_a_proxy_is_a_trace(tmp_path: Path) -> None:
    other = {"unix_s": 3.0, "logger": "tandem.proxy", "message": "ready"}
    ended = {"unix_s": 11.0, "logger": "request", "e2e_ms": 1000.0, "prompt_tokens": 90, "completion_tokens": 7}
    sooner = {**ended, "unix_s": 9.5, "e2e_ms": 500, "cached_tokens": 64}
    refused = {**ended, "completion_tokens": 0, "outcome": "overloaded"}
    file = write(tmp_path, *(json.dumps(line) for line in (other, ended, sooner, refused)))
    assert read_trace(file, 2048) == [TraceRequest(0.0, 26, 7), TraceRequest(1.0, 90, 7)]


def test_csv_is_a_trace(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:48.1805900,396,109",
    )
    first, second = read_trace(file, 2048)
    assert (first, second.at) == (TraceRequest(0.0, 374, 44), pytest.approx(1.5))


def test_json_lines_are_a_trace_with_shared_prefixes_and_turns(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        '{"timestamp": 3000, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]}',
        '{"timestamp": 3500, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}',
        '{"timestamp": 1000, "input_length": 100, "output_length": 5, "chat_id": 1, "parent_chat_id": -1}',
        '{"timestamp": 2000, "input_length": 150, "output_length": 5, "chat_id": 2, "parent_chat_id": 1}',
    )
    trace = read_trace(file, 2048)
    assert [each.at for each in trace] == [0.0, 1.0, 2.0, 2.5] and trace[1].follows == 0
    turn, later, one, other = (prompt_of(trace, number) for number in range(4))
    assert [len(prompt) for prompt in (turn, later, one, other)] == [100, 150, 700, 600]
    assert later[:100] == turn and one[:512] == other[:512] and one[512:] != other[512:]
    assert not set(turn[:1]) & set(one[:1])


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["{}"], r"line 1: .*timestamp.*; correct or remove the line"),
        (['{"timestamp": 1, "input_length": 5, "output_length": 5}', "x"], "line 2: .*malformed"),
        (['{"timestamp": 1, "input_length": 0, "output_length": 5}'], "line 1: .*>= 1"),
        (['{"timestamp": 1, "input_length": 5, "output_length": 5, "parent_chat_id": 3}'], "line 1: .*chat_id 3"),
        (['{"timestamp": 1, "input_length": 2000, "output_length": 49}'], "line 1: .*2,049 tokens.*2,048; remove"),
        (["time,tokens"], "line 1: .*TIMESTAMP"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], "line 2: .*yesterday"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,1"], "line 2: "),
        ([""], "line 1: |no requests"),
        (['{"logger": "request", "unix_s": 5.0}'], "has no requests"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, lines: list[str], error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_trace(write(tmp_path, *lines), 2048)
    assert re.search(error, refused.value.message), refused.value.message


def test_a_trace_is_limited_in_its_requests_and_its_lines(tmp_path: Path) -> None:
    line = '{"timestamp": 1, "input_length": 5, "output_length": 5}'
    with pytest.raises(ConfigError, match="more than 100,000 requests"):
        read_trace(write(tmp_path, *[line] * (MAX_REQUESTS + 1)), 2048)
    with pytest.raises(ConfigError, match="line 1: "):
        read_trace(write(tmp_path, line[:-1] + " " * (1 << 20) + "}"), 2048)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nowhere", 2048)
    late = '{"timestamp": 9e7, "input_length": 1, "output_length": 1}'
    with pytest.raises(ConfigError, match="came within 25 h, and a trace may take 24 h"):
        read_trace(write(tmp_path, late.replace("9e7", "0"), late), 100)


# ---- figures of a worker


def status(*loads: WorkerLoad, roles: Sequence[Role] = ("any", "any")) -> list[StatusReport]:
    workers = [
        WorkerReport(WorkerInfo(f"w{n}", f"w{n}/1", role, "", n), load, [], 0.0, max_model_len=4096, block_size=16)
        for n, (load, role) in enumerate(zip(loads, roles, strict=False))
    ]
    return [StatusReport("p", "m", True, 0, workers)]


def test_figures_come_from_the_status_of_a_cluster(tmp_path: Path) -> None:
    computes = WorkerLoad(num_blocks=300, prompt_tokens_per_s=900.0, traffic=[PairTraffic("w1", 1 << 20, 3, 0.5)])
    decodes = WorkerLoad(
        num_blocks=200, fixed_step_s=0.01, step_s_per_sequence=0.001, step_gap_s=0.002, num_received_tokens=1000
    )
    file = tmp_path / "status.json"
    file.write_bytes(msgspec.json.encode(status(computes, decodes)))
    assert read_figures(file) == WorkerFigures(
        900.0, 0.01, 0.001, 200, 16, 4096, kv_s_per_token=0.0005, step_gap_s=0.002
    )
    file.write_bytes(msgspec.json.encode(FIGURES))
    assert read_figures(file) == FIGURES


def test_a_figure_is_that_of_the_workers_whose_role_it_is() -> None:
    prefill = WorkerLoad(num_blocks=9, prompt_tokens_per_s=900.0, fixed_step_s=0.3, step_s_per_sequence=0.2)
    decode = WorkerLoad(num_blocks=9, prompt_tokens_per_s=100.0, fixed_step_s=0.01, step_s_per_sequence=0.001)
    both = WorkerFigures.of_reports(status(prefill, decode))
    apart = WorkerFigures.of_reports(status(prefill, decode, roles=("prefill", "decode")))
    alone = WorkerFigures.of_reports(status(decode, roles=("decode",)))
    assert both.prompt_tokens_per_s == 500.0 and both.step_s_per_sequence == 0.1005
    assert (apart.prompt_tokens_per_s, apart.fixed_step_s, apart.step_s_per_sequence) == (900.0, 0.01, 0.001)
    assert (alone.prompt_tokens_per_s, alone.fixed_step_s) == (100.0, 0.01)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (msgspec.json.encode(status(WorkerLoad(num_blocks=9))), "send the cluster some load first"),
        (b"[]", "send the cluster some load first"),
        (b"{}", "prompt_tokens_per_s"),
        (msgspec.json.encode(FIGURES).replace(b"0.002", b"-1"), ">= 0"),
        (b"nothing", "tandem status --json"),
    ],
)
def test_figures_that_do_not_fit_are_refused(tmp_path: Path, content: bytes, error: str) -> None:
    file = tmp_path / "figures"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=error):
        read_figures(file)


# ---- playing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_alone_takes_the_time_of_its_steps(layout: Layout) -> None:
    """Messages take at most 0.3 ms each; a prompt of 500 tokens takes 250 ms, and a step of one sequence 22 ms."""
    [served] = play([TraceRequest(0.0, 500, 11)], layout).served
    assert served.ttft_s == pytest.approx(0.25, abs=0.003)
    assert served.tpot_s == pytest.approx(0.022, abs=0.0005)
    assert served.num_tokens == 11 and not served.error


def test_transfers_and_gaps_between_steps_take_their_time() -> None:
    figures = msgspec.structs.replace(FIGURES, kv_s_per_token=0.001, step_gap_s=0.005)
    shape = shape_of(figures, **PAIR)
    played = Player([TraceRequest(0.0, 512, 3)], shape).play()
    [served] = played.served
    assert served.ttft_s == pytest.approx(0.256 + 0.005, abs=0.003)
    first, second = played.gaps_s
    assert second == pytest.approx(0.027, abs=0.0005)
    assert first > 0.3, "32 blocks take 16 ms each, give or take a half"


def test_the_second_turn_of_a_chat_computes_its_new_tokens() -> None:
    trace = [TraceRequest(0.0, 1000, 41), TraceRequest(0.5, 1200, 2, follows=0)]
    [first, turn] = play(trace, ONE_ELASTIC).served
    assert turn.sent_at == pytest.approx(first.last_at, abs=0.001), "not before the answer"
    assert turn.ttft_s == pytest.approx(160 / 2000, abs=0.01)


def test_requests_wait_for_each_other_and_are_refused_as_by_the_cluster() -> None:
    trace = [TraceRequest(0.0, 1000, 2)] * 8
    all_served = play(trace, ONE_ELASTIC).summary(ttft_s=2.0)
    assert all_served["ttft_ms"]["max"] > 3500 and all_served["goodput"] < 0.6 and not all_served["errors"]
    trace = [TraceRequest(0.0, 1000, 2), *[TraceRequest(2.0, 1000, 2)] * 8]  # speeds are known by then
    refusing = play(trace, ONE_ELASTIC, ttft_slo_ms=2000).summary(ttft_s=2.0)
    assert refusing["errors"]["ttft_slo_unreachable"] > 2
    assert refusing["ttft_ms"]["max"] < 2600


def test_the_simulated_worker_measures_the_steps_that_it_was_given() -> None:
    """So the model of the steps is the product's own."""
    trace = [TraceRequest(0.3 * number, 200, 40) for number in range(30)]
    played = play(trace, ONE_ELASTIC)
    [worker] = played.cluster.workers.values()
    times: StepTimes = worker.worker._scheduler.step_times
    assert times.fixed_s == pytest.approx(FIGURES.fixed_step_s, rel=0.05)
    assert times.s_per_sequence == pytest.approx(FIGURES.step_s_per_sequence, rel=0.1)
    assert times.prompt_tokens_per_s == pytest.approx(FIGURES.prompt_tokens_per_s, rel=0.1)


def test_a_seed_decides_everything() -> None:
    trace = [TraceRequest(0.1 * number, 100, 20) for number in range(20)]
    assert play(trace, TWO_ELASTIC).served == play(trace, TWO_ELASTIC).served


def test_percentiles() -> None:
    spread = spread_ms([0.001 * number for number in range(1, 101)])
    assert spread == {"mean": 50.5, "p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 100.0}
    assert spread_ms([]) == {}


# ---- the command


def test_the_command_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, *['{"timestamp": 0, "input_length": 90, "output_length": 9}'] * 3)
    figures = tmp_path / "figures.json"
    figures.write_bytes(msgspec.json.encode(FIGURES))
    command = ["simulate", "--trace", str(trace), "--step-times", str(figures), "--workers", "2", "--itl-slo-ms", "60"]
    run([*command, "--json", str(tmp_path / "report.json"), "--plot", str(tmp_path / "plot.svg")])
    assert "3 requests" in (shown := capsys.readouterr().out) and "goodput: 100.0 %" in shown
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["requests"] == 3 and report["cluster"]["any"] == 2 and report["ttft_ms"]["p50"] > 45
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def run(command: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tandem", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tandem", "simulate", "--trace", str(tmp_path / "trace")])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 2 and "--step-times is missing" in capsys.readouterr().err


# ---- what placement is worth


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reports_count_each_prompt_and_each_sequence_once(layout: Layout) -> None:
    """Workers tell what they received from what they computed, and what they shipped from what ended on them."""
    trace = [TraceRequest(0.04 * number, 256, 30) for number in range(60)]
    loads = [worker.load() for worker in play(trace, layout).cluster.workers.values()]
    num_tokens = sum(load.num_prompt_tokens - load.num_cached_tokens - load.num_received_tokens for load in loads)
    assert num_tokens == sum(request.num_prompt_tokens for request in trace)
    assert sum(load.num_finished - load.num_shipped for load in loads) == len(trace)
    assert sum(load.num_shipped for load in loads) == sum(load.num_received for load in loads)
    assert layout is ONE_ELASTIC or sum(load.num_shipped for load in loads)


def test_preempted_requests_still_get_their_tokens() -> None:
    figures = msgspec.structs.replace(FIGURES, num_blocks=48)
    shape = shape_of(figures, **TWO_ELASTIC)
    played = Player([TraceRequest(0.01 * number, 100, 300) for number in range(12)], shape).play()
    assert sum(worker.load().num_preempted for worker in played.cluster.workers.values())
    assert [served.num_tokens for served in played.served] == [300] * 12


EIGHT = {"prefill": 8, "decode": 8}


def chats(rng: random.Random, num_chats: int, turns_per_s: float) -> list[TraceRequest]:
    """Chats of five turns after one of four system prompts of 512 tokens, ten seconds apart."""
    trace: list[tuple[float, int, int, int]] = []
    for chat in range(num_chats):
        at = rng.uniform(0, 5 * num_chats / turns_per_s)
        for turn in range(5):
            trace.append((at + 10 * turn, chat, turn, rng.randrange(4)))
    trace.sort()
    last: dict[int, int] = {}
    found: list[TraceRequest] = []
    for at, chat, turn, system in trace:
        parent = last.get(chat)
        length = found[parent].num_prompt_tokens + 140 if parent is not None else 612
        found.append(TraceRequest(at, length, 40, (system,) if turn == 0 else (), parent))
        last[chat] = len(found) - 1
    return found


def test_chats_are_routed_to_their_prefixes() -> None:
    """Of a chat's later turns only the new message must be computed: at most 100 tokens and a block of 16."""
    trace = chats(random.Random(1), 60, 20.0)
    played = play(trace, EIGHT, proxies=2)
    loads = [worker.load() for worker in played.cluster.workers.values() if worker.role == "prefill"]
    num_tokens = sum(load.num_prompt_tokens for load in loads)
    must_compute = sum(116 if request.follows is not None else 612 for request in trace)
    assert num_tokens == sum(request.num_prompt_tokens for request in trace)
    assert num_tokens - sum(load.num_cached_tokens for load in loads) < 1.5 * must_compute


@pytest.mark.extended
def test_load_is_balanced_between_proxies_with_the_same_stale_reports() -> None:
    """Four proxies send some 16 prompts in the time between two reports of a worker."""
    rng = random.Random(2)
    trace = [TraceRequest(number / 60, rng.randint(50, 350), 20) for number in range(900)]
    played = play(trace, EIGHT, proxies=4)
    computed = [
        load.num_prompt_tokens for worker in played.cluster.workers.values()
        if worker.role == "prefill" and (load := worker.load())
    ]  # fmt: skip
    assert max(computed) < 1.1 * sum(computed) / len(computed)
    assert played.summary()["ttft_ms"]["p99"] < 800, "a prompt alone takes 100 ms; at random some wait for 1.3 s"


def test_early_rejection_keeps_goodput_past_saturation() -> None:
    """Two workers compute four prompts of 1,000 tokens per second; six arrive."""
    trace = [TraceRequest(number / 6, 1000, 2) for number in range(180)]
    late = play(trace, TWO_ELASTIC).summary(ttft_s=1.0)
    refusing = play(trace, TWO_ELASTIC, ttft_slo_ms=1000).summary(ttft_s=1.0)
    assert late["goodput"] < 0.25 < 0.5 < refusing["goodput"]
    slow = [TraceRequest(number / 2, 1000, 2) for number in range(40)]
    assert play(slow, TWO_ELASTIC, ttft_slo_ms=1000).summary(ttft_s=1.0)["goodput"] > 0.95
