"""What operators see of a running cluster: stages, worker metrics, timelines, traces, log lines and the dashboard.

And what they do not see: prompts, answers and keys.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tandem.telemetry.stages import PLACEMENTS, STAGES
from tests.support.cluster import MODEL, NOW, Cluster
from tests.support.grafana import queries
from tests.support.ports import free_port
from tests.support.waiting import wait_until

SECRET = "xyzzy-the-prompt-is-nobodys-business"
KEY = "sk-not-in-any-log"
PROMETHEUS = "/usr/bin/prometheus"
VARIABLES = {"$__rate_interval": "60s", "$ttft_slo": "1.0", "$tpot_slo": "0.1", "$worker": ".+"}
"""Values that Grafana substitutes for its variables."""


class OtlpReceiver:
    """OTLP collector that stores the received spans in `spans`."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        receiver.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def cluster(receiver: OtlpReceiver) -> Iterator[Cluster]:
    shown = ("--otlp-endpoint", receiver.url, "--log-format", "json", "--log-level", "debug")
    tier = ("--kv-host-gib", "0.05")  # panels of tiers have no data without one
    with Cluster("--proxies", "2", *shown, "--api-key", KEY, *tier) as running:
        yield running


def get(cluster: Cluster, path: str) -> httpx.Response:
    return httpx.get(cluster.admin_url + path, headers=NOW, timeout=30)


def ask(cluster: Cluster, request_id: str, **fields: Any) -> float:
    """Sends one streamed chat and returns its duration in seconds."""
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": SECRET * 8}], "max_tokens": 16, "ignore_eos": True,
        "stream": True, **fields,
    }  # fmt: skip
    traceparent = f"00-{int(request_id, 16):032x}-00000000000000ab-01"
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": request_id, "traceparent": traceparent}
    started = time.monotonic()
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    took_s = time.monotonic() - started
    assert answer.status_code == 200 and answer.text.rstrip().endswith("[DONE]")
    return took_s


def samples(text: str) -> dict[tuple[str, str], float]:
    """Returns the samples by (name, labels as text)."""
    return {
        (sample.name, json.dumps(sample.labels, sort_keys=True)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_stages_add_up_to_the_clients_latency(cluster: Cluster) -> None:
    told_s = sum(ask(cluster, f"a{number}", max_tokens=1 + 8 * number) for number in range(4))
    values = {name: value for (name, labels), value in samples(get(cluster, "/metrics").text).items() if labels == "{}"}
    stages = {name: values[f"tandem_request_{name}_time_seconds_sum"] for name in STAGES}
    assert min(stages.values()) >= 0
    assert sum(stages.values()) == pytest.approx(values["tandem_e2e_request_latency_seconds_sum"], abs=1e-6)
    ttft_s = values["tandem_time_to_first_token_seconds_sum"]
    assert sum(stages[name] for name in list(STAGES)[:5]) == pytest.approx(ttft_s, abs=1e-6)
    assert 0 < ttft_s < values["tandem_e2e_request_latency_seconds_sum"] < told_s
    for name in ("tokenize", "prefill", "transfer", "decode", "detokenize"):
        assert stages[name] > 0, name
    assert {values[f"tandem_request_{name}_time_seconds_count"] for name in STAGES} == {4.0}
    labelled = samples(get(cluster, "/metrics").text)
    placements = {where: labelled["tandem_placements_total", f'{{"placement": "{where}"}}'] for where in PLACEMENTS}
    assert placements == {"same": 0, "two": 3, "deflected": 0, "prefill_only": 1}
    ttft = '{"latency": "ttft"}'
    assert labelled["tandem_predictions_total", ttft] == 4
    assert 0 < labelled["tandem_measured_seconds_total", ttft] < ttft_s, "it begins at the dispatch"


def test_service_discovery_lists_every_worker(cluster: Cluster) -> None:
    ask(cluster, "b0")
    groups = get(cluster, "/sd").json()
    assert [group["labels"] for group in groups] == [
        {"role": "proxy"},
        {"role": "decode", "worker": "decode-0"},
        {"role": "prefill", "worker": "prefill-0"},
    ]
    [proxy], [decode], [prefill] = (group["targets"] for group in groups)
    assert proxy == cluster.admin_url.removeprefix("http://")
    pair = '{"connector": "ipc", "decode_worker": "decode-0", "prefill_worker": "prefill-0"}'

    def metrics_of(address: str) -> dict[tuple[str, str], float]:
        return samples(httpx.get(f"http://{address}/metrics").text)

    assert metrics_of(prefill)["tandem_kv_transfer_bytes_total", pair] > 0
    assert metrics_of(prefill)["tandem_kv_transfer_seconds_count", pair] >= 1
    assert metrics_of(prefill)["tandem_worker_request_prefill_time_seconds_count", "{}"] >= 1
    assert metrics_of(decode)["tandem_worker_step_seconds_count", "{}"] >= 15
    assert metrics_of(decode)["tandem_worker_decode_wait_seconds_count", "{}"] >= 1
    wait_until(
        lambda: metrics_of(decode)["tandem_worker_kv_transfer_bytes_total", "{}"] > 0, 20
    )  # heartbeats report it
    assert metrics_of(decode)["tandem_worker_kv_blocks", "{}"] > 0


def test_any_proxy_returns_a_requests_timeline(cluster: Cluster) -> None:
    ask(cluster, "c0")
    for _ in range(8):  # connections go to either proxy
        timeline = get(cluster, "/debug/requests/c0").json()
        assert timeline["outcome"] == "length" and timeline["completion_tokens"] == 16
        names = [event["event"] for event in timeline["events"]]
        assert names[:3] == ["arrived", "tokenized", "dispatched"] and names[-1] == "ended"
        assert {"first token computed", "decode reserved", "first token delivered", "decode began"} <= set(names)
        assert "attempt over" not in names
        moments = [event["at_s"] for event in timeline["events"]]
        assert moments == sorted(moments) and moments[0] == 0
        assert list(timeline["stages_s"]) == list(STAGES)
        [began] = [event for event in timeline["events"] if event["event"] == "decode began"]
        assert began["kv_bytes"] > 0
        dispatched = timeline["events"][2]
        assert (dispatched["prefill"], dispatched["decode"]) == ("prefill-0", "decode-0")
        assert (dispatched["placement"], dispatched["kv_shipped"]) == ("two", True)
        assert dispatched["predicted_ttft_s"] > 0
    unknown = get(cluster, "/debug/requests/never-seen")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "unknown_request"


def doctor(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cluster.run("doctor", *arguments)


def test_the_doctor_explains_a_request_from_any_proxy(cluster: Cluster) -> None:
    ask(cluster, "1d")
    said = doctor(cluster, "1d")
    assert said.returncode == 0, said.stderr
    text = " ".join(said.stdout.split())
    assert text.startswith("Request 1d (chat)") and "16 tokens generated; ended with length." in text
    assert "prefill-0 computed its prompt and decode-0 decoded." in text and "computing the prompt" in text
    unknown = doctor(cluster, "never-seen")
    assert unknown.returncode == 2 and "no proxy knows a request 'never-seen'" in unknown.stderr


SPIN = """
import hashlib, threading
def spin():
    while True:
        hashlib.sha256(bytes(1 << 22))  # without the interpreter's lock
for _ in range(16):
    threading.Thread(target=spin).start()
"""


def test_the_doctor_names_a_neighbour_that_spins(cluster: Cluster) -> None:
    neighbour = subprocess.Popen([sys.executable, "-c", SPIN])
    is_over = threading.Event()

    def ask_until_over() -> None:
        while not is_over.is_set():
            ask(cluster, "1e")

    asking = threading.Thread(target=ask_until_over)
    asking.start()
    try:
        said = json.loads(doctor(cluster, "--seconds", "5", "--json").stdout)
    finally:
        is_over.set()
        neighbour.kill()
        neighbour.wait()
        asking.join()
    [text] = [finding["text"] for finding in said["findings"] if finding["kind"] == "neighbours"]
    assert f"({neighbour.pid})" in text, text
    assert sum(part["share"] for part in said["ttft"]["parts"]) == pytest.approx(1)


def test_each_request_logs_one_line_without_secrets(cluster: Cluster) -> None:
    ask(cluster, "d0")
    refused = httpx.post(
        f"{cluster.url}/v1/completions",
        json={"model": MODEL, "prompt": SECRET, "n": -1},
        headers={"authorization": f"Bearer {KEY}", "x-request-id": "d1"},
    )
    assert refused.status_code == 400

    def lines(request_id: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in cluster.logs().splitlines() if line.startswith("{")]
        return [line for line in found if line.get("request_id") == request_id]

    wait_until(lambda: bool(lines("d0") and lines("d1")), 20)
    [served], [rejected] = lines("d0"), lines("d1")
    assert (served["logger"], served["outcome"], served["completion_tokens"]) == ("request", "length", 16)
    assert served["ttft_ms"] <= served["e2e_ms"]
    assert rejected["outcome"] == "invalid_request"


def test_logs_metrics_and_status_contain_no_client_data(cluster: Cluster) -> None:
    """At the log level that tells most."""
    url, salt, wrong_key = "zq-url-90ee", "zq-salt-11bc", "zq-wrong-key-8d20"
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=cluster.url, headers=headers, timeout=120) as client:
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:9/{url}"}}]}
        messages = [{"role": "user", "content": SECRET}]
        chat = {"model": MODEL, "messages": messages, "max_tokens": 4, "cache_salt": salt, "user": SECRET}
        for status, fields in (
            (200, {}),
            (200, {"stream": True, "stop": SECRET, "n": 2}),
            (200, {"tools": [{"type": SECRET}]}),
            (400, {"messages": [image]}),
            (400, {"temperature": SECRET}),
            (400, {"structured_outputs": {"regex": f"({SECRET}"}}),
            (404, {"model": SECRET}),
        ):
            answer = client.post("/v1/chat/completions", json=chat | fields)
            assert answer.status_code == status, answer.text
        assert client.post("/tokenize", json={"model": MODEL, "prompt": SECRET}).status_code == 200
        assert client.post("/v1/chat/completions", content=json.dumps(chat).encode()[:-5]).status_code == 400
        assert client.get(f"/{SECRET}").status_code == 404
    refused = httpx.get(f"{cluster.url}/v1/models", headers={"Authorization": f"Bearer {wrong_key}"})
    assert refused.status_code == 401
    kept = {
        "logs": cluster.logs(),
        "metrics": get(cluster, "/metrics").text,
        "status": cluster.run("status", "--json").stdout,
        "processes": "".join(
            Path(f"/proc/{pid}/{name}").read_text() for pid in cluster.pids() for name in ("cmdline", "environ")
        ),
    }
    assert re.search(r'"level": ?"(debug|info)"', kept["logs"]), "there are no log lines to search"
    secrets = (SECRET, KEY, wrong_key, url, salt)
    assert {(where, secret) for where, text in kept.items() for secret in secrets if secret in text} == set()


def test_spans_continue_the_clients_trace(cluster: Cluster, receiver: OtlpReceiver) -> None:
    ask(cluster, "e0")
    trace_id = int("e0", 16).to_bytes(16, "big")

    def spans() -> list[Any]:
        return [span for span in receiver.spans if span.trace_id == trace_id]

    # Spans of one trace may be exported in two batches.
    wait_until(lambda: {"chat", "tokenize", "prefill", "decode"} <= {span.name for span in spans()}, 30)
    [root] = [span for span in spans() if span.name == "chat"]
    assert root.parent_span_id == bytes.fromhex("00000000000000ab")
    attributes = {attribute.key: attribute.value for attribute in root.attributes}
    assert attributes["tandem.request_id"].string_value == "e0"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 16
    stages = sorted((span for span in spans() if span is not root), key=lambda span: span.start_time_unix_nano)
    # A transfer that prefill hid entirely has no span.
    assert {"tokenize", "prefill", "decode"} <= {span.name for span in stages} <= set(STAGES)
    assert {span.parent_span_id for span in stages} == {root.span_id}
    for before, after in itertools.pairwise(stages):
        assert after.start_time_unix_nano == pytest.approx(before.end_time_unix_nano, abs=1000)
    assert SECRET.encode() not in b"".join(span.SerializeToString() for span in spans())


def test_every_panel_has_data_in_a_real_prometheus(cluster: Cluster, tmp_path: Path) -> None:
    """Uses the repository's configuration with another address and scrape interval."""
    if not Path(PROMETHEUS).exists():
        pytest.skip(f"no {PROMETHEUS}; on Debian: apt-get install prometheus")
    port = free_port()
    text = (Path(__file__).parents[2] / "deploy/prometheus/prometheus.yml").read_text()
    text = text.replace("http://127.0.0.1:8001", cluster.admin_url).replace("10s", "1s")
    config = tmp_path / "prometheus.yml"
    config.write_text(text)
    command = [
        PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    process = subprocess.Popen(command)
    missing = queries()
    assert len(missing) > 60

    def has_data(expr: str) -> bool:
        for name, value in VARIABLES.items():
            expr = expr.replace(name, value)
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expr}, timeout=20)
        if answer.status_code == 503:  # Prometheus starts
            return False
        assert answer.status_code == 200, f"{expr}: {answer.text}"
        result = answer.json()["data"]["result"]
        return any(series["value"][1] != "NaN" for series in result)

    def all_have_data() -> bool:
        assert process.poll() is None, "prometheus exited"
        ask(cluster, "ab", max_tokens=4)
        with contextlib.suppress(httpx.TransportError):
            missing[:] = [each for each in missing if not has_data(each[2])]
        return not missing

    try:
        deadline = time.monotonic() + 150
        while not all_have_data():
            assert time.monotonic() < deadline, f"no data for {missing}"
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser, or skips the test."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium at /usr/bin/chromium: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


def test_the_dashboard_shows_the_cluster(cluster: Cluster) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        troubles: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{cluster.admin_url}/dashboard")
        page.wait_for_selector("#state:text-is('ready')", timeout=30_000)
        ask(cluster, "f0")
        page.wait_for_selector("#tiles .big:text-matches('[0-9] *ms p50')", timeout=60_000)
        page.wait_for_selector("#stages i:nth-child(2)", timeout=60_000)
        page.wait_for_selector("#placements i", timeout=60_000)
        workers = page.inner_text("#workers")
        assert re.search(r"prefill-0.*\n?", workers) and "decode-0" in workers
        assert page.locator("#topology line").count() == 1 and "ipc" in page.inner_text("#topology")
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, "on a phone the page is wider than the screen"
        assert all(url.startswith((cluster.admin_url, "data:")) for url in asked), asked
        assert not troubles
