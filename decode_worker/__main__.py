"""Entry point: `python -m tandem.decode_worker CONFIG.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tandem.runtime.collector import while_loading
from tandem.runtime.process import run_process
from tandem.worker.config import WorkerConfig
from tandem.worker.priority import DECODE_NICENESS, step_back


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=WorkerConfig)
    step_back(config.engine, DECODE_NICENESS)
    with while_loading():
        from tandem.decode_worker.worker import DecodeWorker  # torch with it, after the step back

    run_process(config.worker_id, config.log_level, lambda: DecodeWorker(config), config.log_format)


if __name__ == "__main__":
    main()
