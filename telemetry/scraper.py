"""`python -m tandem.telemetry.scraper`: renders the metrics of all processes that share PROMETHEUS_MULTIPROC_DIR.

A byte on stdin asks for it; the answer is its length in 8 bytes, big-endian, and the text. Ends with its stdin.
"""

from __future__ import annotations

import signal
import sys

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the proxy's to handle; it closes our stdin
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    while sys.stdin.buffer.read(1):
        text = generate_latest(registry)
        sys.stdout.buffer.write(len(text).to_bytes(8, "big") + text)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
