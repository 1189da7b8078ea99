"""`python -m tests.sleeper CONFIG`: a process that does nothing until it is ended."""

from __future__ import annotations

import signal
import time

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell ignores
    time.sleep(300)
