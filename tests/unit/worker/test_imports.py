"""What the process that workers are forked from imports, and that it may be forked."""

from __future__ import annotations

import json
import subprocess
import sys

from tandem.runtime.forked_process import ONE_THREAD

UNUSED = {
    "tandem.deploy": "the launcher's",
    "tandem.proxy": "the front end's: a worker gets tokens",
    "starlette": "HTTP",
    "uvicorn": "HTTP",
    "httpx": "HTTP",
    "ray": "only the launcher on Ray",
    "av": "films are decoded by the proxy's media process",
    "scipy": "slow to import, and nothing in a text model needs it",
    "sklearn": "transformers imports it for metrics of generation where it is installed",
    "pandas": "as sklearn",
    "matplotlib": "as sklearn",
    "numba": "the CPU's kernels, imported with the first model on a CPU",
    "mooncake": "the store's client, a process of its own",
    "nixl": "imported by the connector that uses it",
    "opentelemetry": "the proxy's tracing",
    "torch._inductor.compile_fx": "torch's compiler of graphs: nothing is compiled by it",
    "torch.utils.tensorboard": "training",
    "torch.distributed.pipelining": "training",
    "transformers.models.llama": "modelling files are imported by the models that need them",
    "transformers.trainer": "training",
    "tandem.engine.vision.encoder": "only for models with images",
}
"""Modules that a worker of a plain text model does not import, and why. torch._dynamo and torch.distributed.tensor are
not among them: `transformers.modeling_utils` imports both, whatever is asked of it."""

PROGRAM = """
import json, os, sys
import tandem.worker.worker, tandem.worker.follower
from tandem.runtime.fork_server import why_unsafe_to_fork
from pathlib import Path
imported = sorted(sys.modules)
import importlib
from tandem.worker import preload
for module in (*preload.MODULES, *preload.CPU_MODULES):
    importlib.import_module(module)
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
files = [os.readlink(link) for link in links if os.path.exists(link)]
print(json.dumps({"imported": imported, "unsafe": why_unsafe_to_fork(), "files": files}))
"""


def test_a_text_worker_imports_little_and_its_preloaded_process_can_be_forked() -> None:
    command = [sys.executable, "-c", PROGRAM]
    environment = {**dict(ONE_THREAD), "PATH": "/usr/bin"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    unused = {name: UNUSED[name] for name in found["imported"] if name in UNUSED}
    assert not unused, f"imported without need: {unused}"
    assert found["unsafe"] == ""
    assert not [file for file in found["files"] if not file.startswith(("/dev/null", "pipe:", "/proc/"))]
