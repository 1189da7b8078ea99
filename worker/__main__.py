"""Entry point: `python -m tandem.prefill_worker CONFIG.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.worker import PrefillWorker
from tandem.runtime.process import run_process


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=PrefillConfig)
    worker = config.worker
    run_process(worker.worker_id, worker.log_level, lambda: PrefillWorker(config), worker.log_format)


if __name__ == "__main__":
    main()
