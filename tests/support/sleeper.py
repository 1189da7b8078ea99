"""`python -m tests.support.sleeper CONFIG`: a process that sleeps until it is killed."""

from __future__ import annotations

import time

if __name__ == "__main__":
    time.sleep(300)
