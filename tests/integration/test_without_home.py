"""A cluster where its user has no home, no entry in the file of passwords, and almost no folder to write to."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.support.ports import free_port

TIMEOUT_S = 240.0
READ_ONLY = """
mount -t tmpfs tmpfs "$1" || exit 99
for point in $(cut -d' ' -f5 /proc/self/mountinfo | sort -u); do
    case $point in /proc*|/sys*|/dev*|"$1") ;; *) mount -o remount,bind,ro "$point" ;; esac
done 2> /dev/null
cd /
if touch /tmp/probe 2> /dev/null && test "$1" != /tmp; then exit 99; fi
shift
exec setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all env -i PATH=/usr/bin:/bin "$@"
"""
"""Leaves one folder that can be written to, beside /dev/shm, and drops all capabilities."""
NAMESPACE = ("unshare", "--user", "--map-user=12345", "--map-group=0", "--mount", "--keep-caps")


def confined(writable: str, *command: str) -> list[str]:
    """Runs a command as a user whom nobody knows. writable: folder that gets an empty file system."""
    return [*NAMESPACE, "sh", "-c", READ_ONLY, "sh", writable, *command]


@contextmanager
def started(writable: str, *environment: str) -> Iterator[tuple[str, str]]:
    """Yields the URL and what `tandem up` has printed until it served. It must end with 0."""
    if shutil.which("unshare") is None or subprocess.run(confined(writable, "true"), capture_output=True).returncode:
        pytest.skip("this user cannot make namespaces")
    port = free_port()
    flags = ("--port", str(port), "--admin-port", str(free_port()))
    command = (*environment, sys.executable, "-m", "tandem.deploy.cli", "up", *flags)
    process = subprocess.Popen(
        confined(writable, *command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        printed = ""
        while "Press Ctrl-C" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        yield f"http://127.0.0.1:{port}", printed
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, rest
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("writable", "environment", "folder"),
    [
        ("/tmp", (), "/tmp/tandem-12345-{port}"),
        ("/run", ("XDG_RUNTIME_DIR=/run", "HOME=/usr"), "/run/tandem-{port}"),
    ],
)
def test_it_serves_and_says_in_one_line_where_its_logs_are(
    writable: str, environment: tuple[str, ...], folder: str
) -> None:
    with started(writable, *environment) as (url, printed):
        folder = folder.format(port=url.rpartition(":")[2])
        [line] = [line for line in printed.splitlines() if "logs" in line and not line.startswith("Logs: ")]
        assert line.startswith(f"logs and caches are in {folder} until the cluster stops: ")
        assert f"Logs: {folder}/logs. " in printed and "Traceback" not in printed
        body = {"model": "tandem-demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
