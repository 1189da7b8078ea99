"""What the process that workers are forked from imports, and that it may be forked."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from tandem.engine.engine_config import EngineConfig
from tandem.runtime.processes.forked_process import ONE_THREAD
from tandem.worker.tandem_worker_config import TandemWorkerConfig

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

PER_WORKER = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "NCCL_", "TORCH_NCCL_")
"""Beginnings of variables that differ between workers, or that a worker sets. They must be read after the fork."""

GETENV = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

char *getenv(const char *name) {
    static char *(*original)(const char *);
    if (!original) original = (char *(*)(const char *))dlsym(RTLD_NEXT, "getenv");
    dprintf(FD, "%s\\n", name);
    return original(name);
}
char *secure_getenv(const char *name) { return getenv(name); }
"""
"""Writes the names of the variables that libraries read to descriptor FD."""

PROGRAM = """
import json, os, re, sys
fd = int(sys.argv[1])
kind = type(os.environ)
read = kind.__getitem__, kind.__contains__
kind.__getitem__ = lambda self, name: (os.write(fd, f"{name}\\n".encode()), read[0](self, name))[1]
kind.__contains__ = lambda self, name: (os.write(fd, f"{name}\\n".encode()), read[1](self, name))[1]
import tandem.worker.worker, tandem.worker.engine_loading, tandem.worker.follower
from tandem.runtime.processes.fork_server import why_unsafe_to_fork
from pathlib import Path
imported = sorted(sys.modules)
from tandem.worker import preload
import gc
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
preload.load(on_cpu=True)
gc.callbacks.clear()
kind.__getitem__, kind.__contains__ = read
links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd") if int(each) != fd]
files = [os.readlink(link) for link in links if os.path.exists(link)]
unsafe = why_unsafe_to_fork()

import torch
from numba import njit
from tandem.runtime.processes.forked_child import fork_child
from tandem.worker import __main__ as worker
def run():  # a worker with three threads
    sys.argv = ["worker", sys.argv[2]]
    worker.run_process = lambda *_: os.write(answer, str(torch.get_num_threads()).encode())
    worker.main()
threads, answer = os.pipe()
fork_child(run, [answer], {"OMP_NUM_THREADS": "3"}).wait()
num_threads = int(os.read(threads, 10))
before = set(sys.modules)
njit(lambda x: x + 1)(1)
late = sorted(set(sys.modules) - before)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
compiled, compile_pattern = [], re._compiler.compile
re._compiler.compile = lambda *arguments: (compiled.append(arguments[0]), compile_pattern(*arguments))[1]
get_checkpoint_conversion_mapping("llama")
found = dict(imported=imported, unsafe=unsafe, files=files, num_threads=num_threads, late=late, collections=collections)
found["compiled"] = len(compiled)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process sees that imports as the preloaded process does. variables: names that were read meanwhile."""
    folder = tmp_path_factory.mktemp("imports")
    engine = EngineConfig(model="", num_threads=3)
    (folder / "worker.json").write_bytes(msgspec.json.encode(TandemWorkerConfig("w", "decode", "", [], engine=engine)))
    with (folder / "variables").open("w+") as names:
        environment = {**ONE_THREAD, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
        if compiler := shutil.which("cc"):
            (folder / "getenv.c").write_text(GETENV.replace("FD", str(names.fileno())))
            build = [compiler, "-shared", "-fPIC", "getenv.c", "-o", "getenv.so", "-ldl"]
            subprocess.run(build, cwd=folder, check=True)
            environment["LD_PRELOAD"] = str(folder / "getenv.so")
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(names.fileno()), str(folder / "worker.json")],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
            pass_fds=[names.fileno()],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        names.seek(0)
        return {**json.loads(done.stdout.splitlines()[-1]), "variables": set(names.read().splitlines())}


def test_a_text_worker_imports_little(found: dict[str, Any]) -> None:
    unused = {name: UNUSED[name] for name in found["imported"] if name in UNUSED}
    assert not unused, f"imported without need: {unused}"


def test_the_preloaded_process_can_be_forked(found: dict[str, Any]) -> None:
    assert found["unsafe"] == ""
    assert not [file for file in found["files"] if not file.startswith(("/dev/null", "pipe:", "/proc/"))]


def test_the_preloaded_process_imports_without_the_collector(found: dict[str, Any]) -> None:
    assert not found["collections"], "it would scan the modules again and again: a quarter of the time"


def test_the_names_of_weights_are_ready(found: dict[str, Any]) -> None:
    assert found["compiled"] == 0, "each worker would compile 900 regular expressions"


def test_what_differs_between_workers_is_read_after_the_fork(found: dict[str, Any]) -> None:
    assert "TRITON_INTERPRET" in found["variables"] or "PYTORCH_JIT" in found["variables"], "names are recorded"
    assert not {name for name in found["variables"] if name.startswith(PER_WORKER)}
    assert found["num_threads"] == 3, "OMP_NUM_THREADS is read before; the worker sets it by a call"


def test_the_first_kernel_of_a_worker_imports_nothing(found: dict[str, Any]) -> None:
    assert found["late"] == []


SHARED = [
    "tandem.worker.presence", "tandem.handover.kv_traffic", "tandem.worker.serving_worker",
    "tandem.worker.worker_config", "tandem.telemetry.worker_metrics", "tandem.runtime.processes.process",
]  # fmt: skip
"""What workers of all engines share."""


def test_what_workers_share_loads_no_engine() -> None:
    code = f"import sys, {', '.join(SHARED)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "transformers", "numba"} & set(loaded)
    assert not [name for name in loaded if name.startswith(("tandem.engine", "tandem.prefill_", "tandem.decode_"))]


@pytest.mark.parametrize(
    "module", ["tandem.worker.worker", "tandem.simulator.run", "tandem.vllm_worker.scheduler.vllm_scheduler"]
)
def test_a_workers_shell_and_the_simulator_load_no_torch(module: str) -> None:
    """Another engine may lie behind the shell, and seeds run without waiting for libraries that they do not use."""
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'numba'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
