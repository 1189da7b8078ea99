"""Entry point: `python -m tandem.prefill_worker CONFIG.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tandem.prefill_worker.config import PrefillConfig
from tandem.runtime.collector import while_loading
from tandem.runtime.process import run_process
from tandem.worker.priority import PREFILL_NICENESS, step_back


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=PrefillConfig)
    own = config.worker
    step_back(own.engine, PREFILL_NICENESS)
    with while_loading():
        from tandem.prefill_worker.worker import PrefillWorker  # torch with it, after the step back

    run_process(own.worker_id, own.log_level, lambda: PrefillWorker(config), own.log_format)


if __name__ == "__main__":
    main()
