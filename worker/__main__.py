"""Entry point: `python -m tandem.worker CONFIG.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tandem.runtime.garbage_collection import importing
from tandem.runtime.processes.process import run_process
from tandem.worker.tandem_worker_config import TandemWorkerConfig


def main() -> None:
    with importing():
        import torch

        from tandem.worker.engine_loading import load_engine_host
        from tandem.worker.worker import Worker

    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TandemWorkerConfig)
    torch.set_num_threads(config.engine.num_threads)  # OMP_NUM_THREADS is not read again in a forked process
    run_process(config.worker_id, config.logs, lambda: Worker(config, load_engine_host))


if __name__ == "__main__":
    main()
