"""The result of a check is kept by host, device and versions; `tandem status` and `tandem up` say what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.deploy.cluster_config import load_config
from tandem.deploy.commands.status import engine_lines
from tandem.deploy.engine_check import check_report
from tandem.deploy.engine_check.check_report import (
    STEPS,
    CheckReport,
    StepResult,
    expected_engine,
    kept_report,
    report_file,
    save_report,
    status_line,
    unproven_line,
)
from tandem.protocol.messages.membership import StatusReport, WorkerInfo, WorkerLoad, WorkerReport
from tandem.protocol.messages.numerics import Numerics
from tandem.runtime.version import own_version
from tandem.vllm_worker.versions import DEFAULT_VERSION

ENGINE, DEVICE = f"vllm {DEFAULT_VERSION}", "1 x NVIDIA H200"
PASSED = [StepResult(name, True, "3 GB/s through ipc" if name == "transfer rate" else name, 1.0) for name in STEPS]


@pytest.fixture(autouse=True)
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(check_report, "device_name", lambda on_gpus: DEVICE if on_gpus else "CPU")
    monkeypatch.setattr(check_report, "driver_version", lambda: "570.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def report(steps: list[StepResult], **fields: Any) -> CheckReport:
    made = CheckReport(
        "2026-11-29T10:00:00+00:00", "abc", DEVICE, ENGINE, own_version(), "570.1", "llama", {}, steps, {}
    )
    return msgspec.structs.replace(made, **fields)


def test_a_result_is_kept_for_its_host_device_and_versions() -> None:
    assert kept_report(ENGINE, DEVICE) is None
    saved = report(PASSED, logs={"apart decode-0": "a line"})
    file = save_report(saved)
    assert kept_report(ENGINE, DEVICE) == saved
    assert not kept_report("vllm 0.1.0", DEVICE) and not kept_report(ENGINE, "2 x NVIDIA H200")
    file.write_text("{")
    assert kept_report(ENGINE, DEVICE) is None
    for change in (("own_version", lambda: "9.9"), ("host_hash", lambda: "another")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check_report, *change)
            assert report_file(ENGINE, DEVICE) != file


def test_status_says_what_is_known() -> None:
    assert status_line(ENGINE, on_gpus=True) == (
        f"{ENGINE} on {DEVICE}: not checked on this host: tandem engine check --engine vllm --model MODEL"
    )
    save_report(report(PASSED))
    assert status_line(ENGINE, on_gpus=True) == f"{ENGINE} on {DEVICE}: checked on 2026-11-29: ok, 3 GB/s through ipc"
    assert "not checked" in status_line(ENGINE, on_gpus=False)
    save_report(report([*PASSED[:2], StepResult("kill decode", False, "other tokens", 1.0), *PASSED[3:]]))
    assert status_line(ENGINE, on_gpus=True).endswith("failed at kill decode: other tokens")
    save_report(report(PASSED[:2], driver="550.3"))
    assert status_line(ENGINE, on_gpus=True).endswith(
        "not finished on 2026-11-29; the driver was 550.3 and is 570.1 now"
    )


def test_up_names_the_parts_that_are_not_proven() -> None:
    config = load_config(None, {"engine": "vllm"})
    assert expected_engine(config) == ENGINE
    assert unproven_line(config) == (
        f"Not proven for {ENGINE} on {DEVICE} of this host: start, the same tokens with KV that moves, kill -9 of a "
        "decode worker, kill -9 of a prefill worker, transfer rate. Try them with `tandem engine check --engine vllm "
        "--model MODEL`."
    )
    save_report(report([StepResult("kill prefill", False, "hangs", 1.0), *PASSED[:3]]))
    assert ": kill -9 of a prefill worker, transfer rate." in unproven_line(config)
    save_report(report(PASSED))
    assert not unproven_line(config)
    assert "tandem " + own_version() in unproven_line(load_config(None, {})), "another engine"
    assert not unproven_line(load_config(None, {"device": "cpu"})), "on CPUs, the tests of this repository run it"


def test_status_speaks_of_engines_that_were_not_proven_elsewhere() -> None:
    on_gpu, on_cpu = Numerics(instruction_set="compute capability 9.0"), Numerics(instruction_set="AVX2 in torch")

    def worker(name: str, engine: str, numerics: Numerics, host: str = "") -> WorkerReport:
        info = WorkerInfo(name, name, "any", "ipc://x", 1, host_id=host)
        return WorkerReport(info, WorkerLoad(), [], 0.0, engine=engine, numerics=numerics.digest)

    def lines(*workers: WorkerReport) -> list[str]:
        known = {each.digest: each for each in (on_gpu, on_cpu)}
        return [
            each.partition(":")[0]
            for each in engine_lines(StatusReport("p", "m", True, 0, list(workers), numerics=known))
        ]

    own = f"tandem {own_version()}"
    assert lines(worker("a", own, on_cpu)) == []
    assert lines(worker("a", ENGINE, on_cpu), worker("b", ENGINE, on_cpu)) == [f"{ENGINE} on CPU"]
    assert lines(worker("a", own, on_gpu), worker("b", ENGINE, on_gpu)) == [
        f"{own} on {DEVICE}",
        f"{ENGINE} on {DEVICE}",
    ]
    assert lines(worker("a", ENGINE, on_gpu, host="another")) == []
