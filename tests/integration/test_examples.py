"""The programs in examples/ run as examples/README.md says, all but two of them against one cluster."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.deploy.embedding import running_cluster
from tandem.deploy.processes.runtime_dir import runtime_dir
from tandem.runtime.errors import ConfigError
from tests.support.cluster import Cluster, is_alive
from tests.support.ports import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
RunExample = Callable[..., str]

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # the interpreter closes what the programs leave


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder into which the example's connector is installed."""
    source = tmp_path_factory.mktemp("source") / "kv_connector"
    shutil.copytree(
        EXAMPLES / "kv_connector", source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    )
    target = tmp_path_factory.mktemp("plugins")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(target), str(source)], check=True, timeout=120)
    return target


@pytest.fixture(scope="module")
def kv_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def served(plugins: Path, kv_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The demo model with what the examples need: the connector of one, and a folder for batches."""
    data = str(tmp_path_factory.mktemp("data"))
    environment = {"PYTHONPATH": str(plugins), "TANDEM_KV_FOLDER": str(kv_folder)}
    arguments = ("--model", "", "--kv-connector", "folder", "--data-dir", data)
    with Cluster(*arguments, env=environment) as running:
        yield running


@pytest.fixture
def run(served: Cluster, run_example: RunExample, monkeypatch: pytest.MonkeyPatch) -> RunExample:
    """Runs a program against the cluster, and returns what it prints."""
    monkeypatch.setenv("TANDEM_URL", served.url)
    monkeypatch.setenv("TANDEM_ADMIN_URL", served.admin_url)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return run_example


def test_openai_chat(run: RunExample) -> None:
    assert run("openai_chat.py") == "tandem-demo: Hello! What can I do for you?\n"


def test_anthropic_messages(run: RunExample) -> None:
    assert "What is 17 + 25? 17 + 25 = 42 (" in run("anthropic_messages.py")


def test_tool_loop(run: RunExample) -> None:
    first, *_, last = run("tool_loop.py").splitlines()
    assert first in ("call: weather(Lisbon) -> sunny, 24 degrees", "call: weather(Oslo) -> snow, -3 degrees")
    assert last.startswith("answer: ")


def test_structured_output(run: RunExample) -> None:
    assert run("structured_output.py").startswith("Ticket(topic='")


def test_batch(run: RunExample) -> None:
    assert run("batch.py").splitlines() == ["completed", *(f"sum-{n} {n} + {n} = {n + n}" for n in range(10, 20))]


def test_lora(run: RunExample, tmp_path: Path) -> None:
    folder = str(tmp_path / "pirate")
    run("lora_train.py", folder)
    plain, pirate = run("lora_chat.py", folder).splitlines()
    assert plain == "tandem-demo: Hello! What can I do for you?"
    assert pirate.startswith("pirate: Ahoy")


def test_load_and_its_plot(run: RunExample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_SECONDS", "6")
    plot = tmp_path / "load.svg"
    assert "plotted " in run("load_test.py", str(plot))  # fails if a request did
    assert "</svg>" in plot.read_text()


def test_the_connector_carries_the_kv_of_the_other_tests(served: Cluster, kv_folder: Path) -> None:
    before = served.worker("prefill-0").load.num_transferred_bytes
    served.complete(prompt="Once upon a time", max_tokens=4)
    assert [pair.connector for report in served.status().workers for pair in report.pairs] == ["folder"]
    served.wait_for(lambda: served.worker("prefill-0").load.num_transferred_bytes > before)
    served.wait_for(lambda: not list(kv_folder.iterdir()))


def test_replay(run_example: RunExample, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster("--model", "", "--decode", "2", "--worker-wait-s", "120") as own:
        monkeypatch.setenv("TANDEM_URL", own.url)
        lines = run_example("replay.py").splitlines()
    assert lines[0].startswith("killed decode-") and lines[1].endswith("of 4 sequences migrated")
    assert lines[1][0] != "0" and lines[2].startswith("equal: 4 sequences")


def test_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("TANDEM_PORT", str(port))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "embedded.py")], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "17 + 25 = 42\nstopped\n"
    assert not runtime_dir(port).exists()


KILLED = """
import sys, time
from tandem.deploy.embedding import running_cluster
with running_cluster(port=int(sys.argv[1]), admin_port=int(sys.argv[2])) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def test_an_embedded_cluster_ends_with_its_program() -> None:
    program = [sys.executable, "-c", KILLED, str(free_port()), str(free_port())]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert httpx.get(f"{url}/health", timeout=30).status_code == 200
            pids = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
            assert len(pids) >= 3
        finally:
            process.send_signal(signal.SIGKILL)
    Cluster.wait_for(lambda: not any(is_alive(pid) for pid in pids), 30)


def test_embedding_refuses_what_cannot_start(served: Cluster) -> None:
    def start(**values: Any) -> None:
        with running_cluster(**values):
            pytest.fail("it started")

    for values, reason in (
        ({"prefil": 1}, "did you mean prefill?"),
        ({"prefill": -1}, "--prefill -1"),
        ({"ray": "auto", "model": "m", "insecure_network": True}, "tandem up --ray"),
        ({"port": served.port, "admin_port": free_port()}, f"already uses port {served.port}"),
        ({"port": free_port(), "admin_port": free_port(), "model": "/nowhere"}, "/nowhere"),
    ):
        with pytest.raises(ConfigError, match=reason):
            start(**values)


def test_every_example_has_a_line_in_the_readme() -> None:
    text = (EXAMPLES / "README.md").read_text()
    names = {file.name for file in EXAMPLES.glob("*.py")} | {"kv_connector"}
    assert {name for name in names if f"]({name})" in text} == names
