"""Installs a wheel into an empty environment and asks its demo model: `python -m tools.installed_wheel dist/*.whl`.

Dependencies come from the package index, in the versions of requirements.lock. `make release` runs this.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START_TIMEOUT_S = 300.0
"""The first start compiles the CPU kernels."""
REQUEST = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "max_tokens": 20}


def main() -> None:
    [wheel] = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="tandem-wheel-") as folder:
        begun = time.monotonic()
        tandem = install(Path(wheel).resolve(), Path(folder) / "environment")
        print(f"installed {Path(wheel).name} in {time.monotonic() - begun:.0f} s", flush=True)
        print(f"the demo model answers: {serve_and_ask(tandem, Path(folder))}")


def install(wheel: Path, environment: Path) -> Path:
    """Returns the `tandem` program of a new environment."""
    uv = str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(environment)], check=True)
    python, lock = str(environment / "bin" / "python"), str(ROOT / "requirements.lock")
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "-c", lock, str(wheel)], check=True)
    return environment / "bin" / "tandem"


def serve_and_ask(tandem: Path, folder: Path) -> str:
    """Starts a cluster outside of the repository, asks it once, and stops it. Raises AssertionError if that fails."""
    port = free_ports()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    cluster = subprocess.Popen([tandem, "up", "--port", str(port)], cwd=folder, env=environment)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_healthy(port):
            assert cluster.poll() is None, "the cluster ended while it started"
            assert time.monotonic() < deadline, f"not ready within {START_TIMEOUT_S:g} s"
            time.sleep(0.5)
        answer = ask(port)
        text: str = answer["choices"][0]["message"]["content"]
        assert "42" in text, text
        status = subprocess.run(
            [tandem, "status", "--port", str(port)],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert "1 on two workers" in status, status
    finally:
        cluster.send_signal(signal.SIGINT)
        exit_code = cluster.wait(60)
    assert exit_code == 0, f"the cluster ended with {exit_code}"
    return text


def ask(port: int) -> Any:
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(REQUEST).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def free_ports() -> int:
    """Returns a free port whose successor, for the admin routes, is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


if __name__ == "__main__":
    main()
