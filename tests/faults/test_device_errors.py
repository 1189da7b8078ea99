"""Workers whose device fails for good, or is out of memory, in a real cluster.

There is no GPU here: a `sitecustomize` of the workers raises what torch raises, when a file asks for it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.phases import Phases
from tests.faults.streams import Stream
from tests.support.cluster import MODEL, Cluster
from tests.support.waiting import wait_until

FAULTS = """
import sys
if "tandem.worker.preload" in sys.orig_argv:
    import os
    from pathlib import Path
    import torch
    from tandem.engine.model_runner import ModelRunner

    run = ModelRunner.run

    def failing(self, batch):
        asked = Path({folder!r}) / str(os.getpid())
        outputs = run(self, batch)
        if asked.exists():
            error, number = asked.read_text().split()
            if int(number) > 1:
                asked.write_text(f"{{error}} {{int(number) - 1}}")
            else:
                asked.unlink()
            raise getattr(torch, error)("CUDA error: asked for by a test")
        return outputs

    ModelRunner.run = failing
"""
BODY = {"model": MODEL, "prompt": list(range(5, 60)), "temperature": 0, "max_tokens": 300, "ignore_eos": True}


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_streams_go_on_when_a_device_fails_or_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULTS.format(folder=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    flags = ("--prefill", "1", "--decode", "2", "--dtype", "float32")
    with Cluster(*flags) as cluster:
        phases = Phases(cluster)
        expected = Stream(cluster, {**BODY, "return_token_ids": True})
        assert expected.wait(120) and len(expected.token_ids) == 300
        for error, count, is_lost in (("OutOfMemoryError", 3, False), ("AcceleratorError", 1, True)):
            stream = Stream(cluster, {**BODY, "return_token_ids": True})
            wait_until(lambda stream=stream: len(stream.token_ids) > 5, 60)
            name = [e for e in phases.events(stream) if e["event"] == "dispatched"][-1]["decode"]
            pid = phases.pid(name)
            (tmp_path / str(pid)).write_text(f"{error} {count}")
            assert stream.wait(120) and stream.outcome == "length"
            assert stream.token_ids == expected.token_ids
            wait_until(lambda pid=pid: not (tmp_path / str(pid)).exists(), 30)
            if is_lost:
                cluster.wait_for(lambda name=name, pid=pid: phases.pid(name) != pid)
                assert "the device has failed; the worker ends: CUDA error: asked for by a test" in cluster.logs()
            else:
                assert phases.pid(name) == pid
        cluster.wait_for(cluster.all_blocks_free)
