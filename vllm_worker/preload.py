"""The process from which vLLM workers on CPUs are forked: as `worker.preload`, in vLLM's interpreter.

After these imports vLLM has started no thread. On GPUs it has not been tried.
"""

from __future__ import annotations

import importlib

from tandem.runtime.garbage_collection import importing
from tandem.worker.preload import serve

MODULES = (
    "tandem.vllm_worker.__main__",
    "tandem.vllm_worker.vllm_host",
    "vllm.v1.worker.cpu_worker",  # and with it what runs models
)


def load() -> None:
    """Imports the modules. Leaves no thread."""
    with importing():
        for module in MODULES:
            importlib.import_module(module)


if __name__ == "__main__":
    serve("tandem.vllm_worker", load)
