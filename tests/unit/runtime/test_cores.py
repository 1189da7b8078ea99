"""The number of cores that a process may use: of its affinity, its CPU quota, and the quotas of the groups above."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.runtime.cores import cpu_quota, num_cores

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
)
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
REAL = Path("/sys/fs/cgroup/cpu")


class Host:
    """Folders that look like /proc/self and the mounted control groups."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.files = folder / "proc", folder / "files"
        self.proc.mkdir()

    def has(self, groups: str, mounts: str) -> None:
        (self.proc / "cgroup").write_text(groups)
        (self.proc / "mountinfo").write_text("23 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n" + mounts)

    def limits(self, folder: str, **files: str) -> None:
        """Writes the kernel's files of a group; `_` in a name stands for a dot after cpu."""
        group = self.files / folder.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (group / name.replace("_", ".", 1)).write_text(text)

    @property
    def quota(self) -> float:
        return cpu_quota(self.proc, self.files)

    @property
    def num_cores(self) -> int:
        return num_cores(self.proc, self.files)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose affinity lets the process use 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("50000 100000", 1),
        ("100000 100000", 1),
        ("150000 100000", 2),
        ("800000 100000", 8),
        ("1000 1000000", 1),
        ("6400000 100000", 64),
        ("99999999999999999999 1000", 64),
        ("max 100000", 64),
    ],
)
def test_the_quota_of_version_2_limits_the_cores(host: Host, cpu_max: str, expected: int) -> None:
    host.has("0::/\n", V2)
    host.limits("/sys/fs/cgroup", cpu_max=f"{cpu_max}\n")
    assert host.num_cores == expected


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [("-1", "100000", 64), ("50000", "100000", 1), ("250000", "100000", 3), ("0", "100000", 64)],
)
def test_the_quota_of_version_1_limits_the_cores(host: Host, quota: str, period: str, expected: int) -> None:
    host.has("4:cpu,cpuacct:/kubepods/pod1\n3:cpuset:/elsewhere\n0::/\n", V1)
    host.limits("/sys/fs/cgroup/cpu,cpuacct/kubepods/pod1", cpu_cfs_quota_us=quota, cpu_cfs_period_us=period)
    assert host.num_cores == expected


def test_the_lowest_quota_of_all_groups_above_counts(host: Host) -> None:
    host.has("0::/kubepods.slice/pod.slice/container.scope\n", V2)
    for folder, cpu_max in (
        ("/sys/fs/cgroup/kubepods.slice", "1600000 100000"),
        ("/sys/fs/cgroup/kubepods.slice/pod.slice", "300000 100000"),
        ("/sys/fs/cgroup/kubepods.slice/pod.slice/container.scope", "max 100000"),
    ):
        host.limits(folder, cpu_max=cpu_max)
    assert (host.quota, host.num_cores) == (3.0, 3)
    host.limits("/sys/fs/cgroup", cpu_max="200000 100000")
    assert host.num_cores == 2


def test_quotas_of_both_versions_count(host: Host) -> None:
    host.has("4:cpu,cpuacct:/a\n0::/b\n", HYBRID)
    host.limits("/sys/fs/cgroup/cpu,cpuacct/a", cpu_cfs_quota_us="400000", cpu_cfs_period_us="100000")
    assert host.num_cores == 4
    host.limits("/sys/fs/cgroup/unified/b", cpu_max="200000 100000")
    assert host.num_cores == 2


def test_a_container_without_a_namespace_of_groups_sees_only_its_own(host: Host) -> None:
    """Docker on version 1: /proc/self/cgroup has the host's path, of which the container has mounted the last part."""
    mounts = "32 31 0:29 /docker/1f /sys/fs/cgroup/cpu,cpuacct ro,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    host.has("4:cpu,cpuacct:/docker/1f/inner\n", mounts)
    host.limits("/sys/fs/cgroup/cpu,cpuacct", cpu_cfs_quota_us="200000", cpu_cfs_period_us="100000")
    assert host.num_cores == 2
    host.limits("/sys/fs/cgroup/cpu,cpuacct/inner", cpu_cfs_quota_us="100000", cpu_cfs_period_us="100000")
    assert host.num_cores == 1


@pytest.mark.parametrize("group", ["/../../other", "/elsewhere", ""])
def test_a_group_that_is_not_mounted_has_the_quota_of_what_is(host: Host, group: str) -> None:
    host.has(f"0::{group}\n", V2.replace(" / ", " /seen ", 1))
    host.limits("/sys/fs/cgroup", cpu_max="200000 100000")
    host.limits("/other", cpu_max="100000 100000")
    assert host.num_cores == 2


def test_mount_points_may_have_blanks_and_groups_colons(host: Host) -> None:
    host.has("0::/a:b/c\n", V2.replace("/sys/fs/cgroup", r"/my\040groups\134x"))
    host.limits(r"/my groups\x/a:b", cpu_max="300000 100000")
    assert host.num_cores == 3


@pytest.mark.parametrize("text", ["", "max", "x 100000", "100000 0", "1 2 3", "-5 100000", "\0", "1e9 100000"])
def test_what_the_kernel_would_not_write_limits_nothing(host: Host, text: str) -> None:
    host.has("0::/\n", V2)
    host.limits("/sys/fs/cgroup", cpu_max=text)
    assert (host.quota, host.num_cores) == (math.inf, 64)


def test_a_mount_point_that_is_no_path_is_ignored(host: Host) -> None:
    host.has("0::/\n", V2.replace("/sys/fs/cgroup", "sys"))
    assert host.quota == math.inf


def test_without_proc_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7})
    assert num_cores(tmp_path / "none") == 2


def test_the_affinity_counts_if_it_is_smaller(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.has("0::/\n", V2)
    host.limits("/sys/fs/cgroup", cpu_max="800000 100000")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert host.num_cores == 1


@given(groups=st.text(), mounts=st.text())
def test_any_text_is_read(tmp_path_factory: pytest.TempPathFactory, groups: str, mounts: str) -> None:
    host = Host(tmp_path_factory.mktemp("host"))
    (host.proc / "cgroup").write_text(groups, errors="replace")
    (host.proc / "mountinfo").write_text(mounts, errors="replace")
    assert host.num_cores >= 1


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real control group with a quota of half a core. Needs root and version 1."""
    group = REAL / f"tandem-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a control group: {error}")
    (group / "inner").mkdir()
    (group / "cpu.cfs_quota_us").write_text("50000")
    yield group / "inner"
    (group / "inner").rmdir()
    group.rmdir()


def test_a_process_in_a_real_group_sees_its_quota(limited_group: Path) -> None:
    program = "from tandem.runtime.cores import *; print(num_cores(), cpu_quota())"
    joined = f'echo $$ > {limited_group}/cgroup.procs && exec {sys.executable} -c "{program}"'
    done = subprocess.run(["sh", "-c", joined], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "0.5"]
