"""`tandem` runs in a folder with files that have the names of modules that its processes import. None of them runs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tandem.runtime.processes.command_line import SAFE_PATH, python_command
from tests.support.cluster import Cluster, children_of
from tests.support.media_proxy import data_url, image_part
from tests.support.vision_model import encoded, picture, save_model
from tests.support.vllm_clusters import START_TIMEOUT_S, cluster_arguments

TANDEM = str(Path(sys.executable).with_name("tandem"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with such files. Each writes its name, and what imports it, to the file `imported`."""
    made = tmp_path / "downloads"
    made.mkdir()
    (tmp_path / "imported").touch()
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "vllm", "uv"} - {"tandem"}
    for name in filter(str.isidentifier, names):
        note = f"print({name!r}, sys.argv, file=open({str(tmp_path / 'imported')!r}, 'a'))"
        (made / f"{name}.py").write_text(f"import sys\n{note}\n")
    return made


def imported(folder: Path) -> str:
    return (folder.parent / "imported").read_text()


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_python_as_tandem_starts_it_imports_nothing_from_its_folder(folder: Path) -> None:
    """The same without that is the proof that the files are seen."""
    code = "import subprocess, sys, msgspec, venv; subprocess.run([sys.executable, '-c', 'import msgspec'])"
    safe = {**ENVIRONMENT, **SAFE_PATH}
    subprocess.run(python_command("-c", code), cwd=folder, env=safe, check=True, timeout=60)
    subprocess.run(python_command("-m", "venv", "-h"), cwd=folder, env=safe, check=True, timeout=60)
    assert not imported(folder)
    subprocess.run([sys.executable, "-c", "import msgspec"], cwd=folder, env=ENVIRONMENT, check=True, timeout=60)
    assert imported(folder).startswith("msgspec ['-c']")


@pytest.mark.parametrize("command", [[TANDEM], [sys.executable, "-m", "tandem.deploy.cli"]], ids=["script", "module"])
def test_the_command_imports_nothing_from_its_folder(folder: Path, command: list[str]) -> None:
    if command == [TANDEM]:  # otherwise Python would run it, whatever the package does
        (folder / "tandem.py").write_bytes((folder / "uv.py").read_bytes())
    arguments = [*command, "up", "--model", str(folder / "no model")]
    ended = subprocess.run(arguments, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "no model" in ended.stderr
    assert not imported(folder)


@pytest.mark.extended
@pytest.mark.parametrize("engine", ["tandem", "vllm"])
def test_no_process_of_a_cluster_imports_anything_from_its_folder(folder: Path, tmp_path: Path, engine: str) -> None:
    """It starts processes for requests with a grammar and with an image, and one for a large file of a batch."""
    has_images = engine == "tandem"
    flags = ["--data-dir", str(tmp_path / "data")]
    flags += ["--model", str(save_model(tmp_path / "model"))] if has_images else cluster_arguments()
    flags += ["--served-model-name", "m"]
    (temporary := tmp_path / "temporary").mkdir()
    environment = {"PYTHONPATH": "", "TMPDIR": str(temporary)}
    with Cluster(*flags, cwd=folder, env=environment, start_timeout_s=START_TIMEOUT_S) as cluster:
        text = {"type": "text", "text": "one"}
        content = [image_part(data_url(encoded(picture()))), text] if has_images else [text]
        body = {
            "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "ignore_eos": True,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        }  # fmt: skip
        if has_images:
            del body["ignore_eos"]
        answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        line: dict[str, object] = {"custom_id": "", "method": "POST", "url": "/v1/completions"}
        line["body"] = {"model": "m", "prompt": [1, 2, 3] * 1000, "max_tokens": 1}
        lines = "\n".join(json.dumps({**line, "custom_id": str(i)}) for i in range(40))
        file = httpx.post(
            f"{cluster.url}/v1/files", files={"file": ("a.jsonl", lines)}, data={"purpose": "batch"}, timeout=60
        ).json()
        batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        made = httpx.post(f"{cluster.url}/v1/batches", json=batch, timeout=60).json()

        def is_checked() -> bool:
            found = httpx.get(f"{cluster.url}/v1/batches/{made['id']}", timeout=60).json()
            return found["status"] != "validating"

        cluster.wait_for(is_checked)
        assert len(cluster.pids()) >= 3 and all(children_of(pid) is not None for pid in cluster.pids())
    assert not imported(folder)
    assert not list(temporary.glob("vllm*")), "vLLM leaves its temporary files behind, in a folder that we remove"
