"""A cluster started without a model answers as the README and the docs show."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.cluster import MODEL, OLDER_CPU, Cluster
from tests.support.sse import whole_stream

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module", params=[{}, OLDER_CPU], ids=["this-cpu", "older-cpu"])
def demo(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster("--model", "", env=request.param) as running:  # as `make serve`
        yield running


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_get_the_answers_that_are_shown(demo: Cluster) -> None:
    page = (ROOT / "README.md").read_text()
    greeting, story = (line for line in page.splitlines() if line.startswith("curl"))
    assert f"> {run_curl(demo, greeting)}\n" in page
    for _ in range(3):  # sampled: another story each time, but a whole one
        assert run_curl(demo, story).endswith("The end.")
    status = demo.run("status").stdout
    for words in ("on two workers (KV handed over)", "prefill-0 decode-0 ready ipc", "MB moving"):
        assert words in page and words in status


def run_curl(demo: Cluster, line: str) -> str:
    """Runs the command against the cluster and returns the text of the stream."""
    done = subprocess.run(
        ["bash", "-c", line.replace(":8000", f":{demo.port}").replace("curl", "curl -sf", 1)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 0
    choices = [choice for event in whole_stream(done.stdout) for choice in event["choices"]]
    answer = "".join(choice["delta"].get("content") or "" for choice in choices)
    assert choices[-1]["finish_reason"] == "stop"
    return answer


def shown_chats() -> list[list[tuple[str, str]]]:
    """Returns the chats in docs/demo_model.md as (role, content) of each message."""
    page = (ROOT / "docs" / "demo_model.md").read_text()
    blocks = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    return [[(role, text) for role, text in re.findall(r"^(\w+): (.*)$", block, re.MULTILINE)] for block in blocks]


def test_the_docs_show_the_demo_models_answers(demo: Cluster) -> None:
    chats = shown_chats()
    assert len(chats) >= 8
    for chat in chats:
        messages = [{"role": role, "content": text} for role, text in chat]
        for place, (role, text) in enumerate(chat):
            if role != "assistant":
                continue
            body = {"model": MODEL, "messages": messages[:place], "temperature": 0}
            answer = httpx.post(f"{demo.url}/v1/chat/completions", json=body, timeout=TIMEOUT_S).json()
            assert answer["choices"][0]["message"]["content"] == text, messages[:place]
