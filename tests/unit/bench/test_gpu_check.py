"""`make gpu-check` without a GPU: its parts run one by one under deadlines, and its wheels are complete and small."""

from __future__ import annotations

import heapq
import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.gpu import kernels
from bench.gpu.check import LIMIT_S, PARTS, PartOfCheck, result_table, run_all
from tandem.engine.attention.interface import AttentionOptions
from tandem.engine.cuda import attention_kernel, triton_attention
from tandem.runtime import version
from tests.support.compiled_kernels import RecordedKernels, bound
from tools.gpu_wheels import LEFT_OUT, locked, needed, pieces

ROOT = Path(__file__).parents[3]
WRITES = "import json, sys; print('a line'); json.dump({'passed': 1}, open(sys.argv[-1], 'w'))"


@pytest.mark.extended
def test_a_part_that_fails_or_hangs_costs_only_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = [
        PartOfCheck("hangs", 15, ("-c", f"{WRITES}\nimport time; sys.stdout.flush(); time.sleep(600)")),
        PartOfCheck("crashes", 60, ("-c", "print('on its way'); import os; os.abort()")),
        PartOfCheck("passes", 60, ("-c", WRITES)),
    ]
    report = tmp_path / "check.json"
    assert not run_all(parts, ["--device", "cpu"], report, limit_s=135)
    found = json.loads(report.read_text())["figures"]
    assert list(found["parts"]) == ["hangs", "crashes", "passes"]
    assert [part["problem"] for part in found["parts"].values()] == ["not finished within 15 s", "status -6", ""]
    assert found["parts"]["hangs"]["passed"] == 1, "what it had found is kept"
    assert "on its way" in found["parts"]["crashes"]["output"] and "a line" in found["parts"]["hangs"]["output"]
    assert "output" not in found["parts"]["passes"], "the archive has it"
    with tarfile.open(tmp_path / "check.tar.gz") as archive:
        kept = archive.extractfile("check/passes.log")
        assert kept is not None and kept.read() == b"a line\n"
    assert {file.name for file in tmp_path.iterdir()} == {"check.json", "check.tar.gz"}
    assert {"host"} <= found["memory_before"].keys() and {"host"} <= found["memory_after"].keys()
    printed = capfd.readouterr().out
    assert "a line" in printed and "crashes: status -6" in printed and "passes: passed" in printed


LEAVES_CLUSTER = """
import subprocess, sys, time
leader = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", leader], start_new_session=True)
time.sleep(600)
"""


@pytest.mark.extended
def test_a_part_leaves_no_process_behind(tmp_path: Path) -> None:
    """As a cluster whose benchmark is killed: its launcher leads a session of its own."""
    check = (
        "import pathlib; from bench.gpu import check; check.adopt_orphans(); "
        f"part = check.PartOfCheck('leaves', 5, ('-c', {LEAVES_CLUSTER!r})); "
        f"print(check.run_part(part, [], pathlib.Path({str(tmp_path)!r}), 5)['problem'])"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=60)
    pid, problem = done.stdout.splitlines()
    assert problem == "not finished within 5 s", done.stderr
    assert not psutil.pid_exists(int(pid))


def test_the_table_compares_what_was_measured() -> None:
    row = {"what": "decode of 1, ms", "measured": 5.0, "predicted": 4.0, "share": 0.72, "of": "bandwidth", "aim": 0.7}
    copies = {"what": "copies", "measured": 3.0, "predicted": None, "share": None, "of": "", "aim": None}
    lines = list(result_table({
        "engine": {"problem": "status 1", "passed": 2, "failures": {"a case": "..."}, "comparisons": [row, copies]},
        "kills": {"problem": "no time left of 530 s"},
        "kernels": {"problem": "", "figures": {"skipped": "why"}},
    }))  # fmt: skip
    assert lines[0].split(maxsplit=1)[1] == "status 1, 2 cases passed; failed: a case"
    assert lines[1].split(maxsplit=1)[1] == "no time left of 530 s, 0 cases passed"
    assert lines[2].split(maxsplit=1)[1] == "skipped: why, 0 cases passed"
    assert lines[5].split(maxsplit=4)[4].split(maxsplit=2) == ["5", "4", "1.25  0.72 of the bandwidth, aim 0.7 reached"]
    assert lines[6].split() == ["copies", "3", "-", "-"]


def test_the_report_is_written_after_each_part_and_time_is_shared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "check.json"
    look = f"import json; json.dump({{'found': list(json.load(open({str(report)!r}))['figures']['parts'])}}, " \
        "open(__import__('sys').argv[-1], 'w'))"  # fmt: skip
    parts = [PartOfCheck("first", 60, ("-c", WRITES)), PartOfCheck("second", 60, ("-c", look))]
    assert run_all(parts, [], report)
    assert json.loads(report.read_text())["figures"]["parts"]["second"]["found"] == ["first"]
    assert "second (at most 120 s)" in capfd.readouterr().out, "as much again of the time that is left"
    assert not run_all(parts, [], report, limit_s=1)
    problems = [part["problem"] for part in json.loads(report.read_text())["figures"]["parts"].values()]
    assert problems == ["no time left of 1 s"] * 2


def test_all_parts_together_fit_into_nine_minutes() -> None:
    """So no part takes time from a later one, however long the earlier ones take."""
    assert sum(part.limit_s for part in PARTS) <= LIMIT_S < 9 * 60


def test_what_matters_most_comes_first() -> None:
    """Steps that are right and fast, then KV between processes; single assumptions and lengths of prompts last."""
    names = [part.name for part in PARTS]
    assert names[:3] == ["engine", "kernels", "kv_transfer"]
    assert names[3:8] == ["checkpoint", "quantised", "kills", "cluster", "tests"]


def test_limits_hold_what_the_parts_took_on_a_gpu() -> None:
    """With a tenth more, by the recorded run on an H200."""
    recorded = json.loads((ROOT / "bench/results/gpu_check.json").read_text())["figures"]["parts"]
    assert recorded.keys() == {part.name for part in PARTS} - {"exactness"}, "which has not run on a GPU"
    for part in PARTS:
        if part.name == "exactness":
            continue
        assert recorded[part.name]["seconds"] * 1.1 < part.limit_s, part.name


COMPILING_S = {torch.bfloat16: 1.7, torch.float16: 1.7, torch.float32: 3.7}
"""Of one variant of a kernel on one core, measured; 2.2 with a pool in FP8."""
START_S = 8.0
"""Of a process that compiles."""


@pytest.mark.parametrize("num_cores", [8, pytest.param(16, marks=pytest.mark.extended)])
def test_all_variants_of_the_kernels_compile_within_the_part_s_limit(
    num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_at_s = [START_S] * num_cores
    for case in kernels.cases_of("cuda", is_short=False):
        seconds = 2.2 if case.stored == kernels.FP8 else COMPILING_S[case.dtype]
        num_variants = len(variants_of(case, monkeypatch))
        assert 4 <= num_variants <= 12
        heapq.heapreplace(free_at_s, free_at_s[0] + num_variants * seconds)
    limit_s = {part.name: part.limit_s for part in PARTS}["kernels"]
    assert max(free_at_s) < limit_s


def variants_of(case: kernels.Case, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What Triton compiles for a case."""
    found: set[str] = set()
    recorded = RecordedKernels(attention_kernel, lambda launch: found.add(repr((launch.name, bound(launch, 90)))))

    def attend(
        pool: Any, items: Any, options: AttentionOptions, group: int, dtype: torch.dtype, make: Any
    ) -> None:  # fmt: skip
        num_kv_heads, num_tokens = pool.layout.num_kv_heads, sum(len(item.token_ids) for item in items)
        query, key, value = (
            torch.zeros((1, num_tokens, num_heads, pool.layout.head_dim), dtype=dtype).transpose(1, 2)
            for num_heads in (num_kv_heads * group, num_kv_heads, num_kv_heads)
        )
        make(pool, items).attend(1, query, key, value, options)

    monkeypatch.setattr(triton_attention, "find_kernels", lambda: recorded)
    monkeypatch.setattr(kernels, "compare", attend)
    kernels.check_case(replace(case, device="cpu"))
    return found


def test_a_machine_without_a_c_compiler_is_refused() -> None:
    """Without one only plain attention would run, and all figures would be of that."""
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": "/nowhere"}
    command = [sys.executable, "-m", "bench.gpu.check"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Triton needs a C compiler: install gcc" in done.stderr


SHORT_PARTS = ("kernels", "kv_transfer", "checkpoint", "quantised", "exactness", "attention")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_parts_pass_on_a_cpu(tmp_path: Path) -> None:
    """`tests/faults/test_gpu_check.py` runs the others."""
    report = tmp_path / "check.json"
    command = [sys.executable, "-m", "bench.gpu.check", "--device", "cpu", "--quick", "--json", str(report)]
    command += ["--parts", ",".join(SHORT_PARTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name, part in json.loads(report.read_text())["figures"]["parts"].items():
        assert part["passed"] and not part["failures"], name


def test_a_checkout_without_a_distribution_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(version, "version", missing)
    assert version.own_version() == "0+checkout"
    uses = [file for folder in ("deploy", "proxy", "worker") for file in (ROOT / folder).rglob("*.py")]
    assert not [file for file in uses if re.search(r"version\(['\"]tandem", file.read_text())]


def test_the_wheels_are_locked_and_leave_torch_out() -> None:
    names = needed()
    assert {"transformers", "tokenizers", "msgspec", "pyzmq", "locust", "gevent", "llvmlite"} <= names
    assert not [name for name in names if LEFT_OUT.fullmatch(name)]
    lock = locked(names, (ROOT / "requirements.lock").read_text())
    entries = [line for line in lock.splitlines() if line and not line.startswith(" ")]
    assert len(entries) >= len(names) - 3 and all("==" in entry for entry in entries)
    assert lock.count("--hash=") >= len(entries)


def test_pieces_are_few_and_small() -> None:
    assert pieces({"a": 5, "b": 4, "c": 3, "d": 3}, 8) == [["a", "c"], ["b", "d"]]
    with pytest.raises(SystemExit, match="big has"):
        pieces({"big": 9}, 8)
