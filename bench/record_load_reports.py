"""Records a running cluster's load reports, one line a second: what the planner would have seen, to play again.

`python -m bench.record_load_reports --port 8000 --seconds 60 --out FILE`. `read_recording` reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import lzma
import time
from pathlib import Path

import msgspec

from tandem.deploy.autoscale.autoscaler import freshest_loads
from tandem.deploy.commands.status import fetch_status
from tandem.protocol.messages.membership import WorkerInfo, WorkerLoad


class Observed(msgspec.Struct, frozen=True):
    """at: seconds from the recording's start."""

    at: float
    workers: list[tuple[WorkerInfo, WorkerLoad]]


def read_recording(file: Path) -> list[Observed]:
    """Plain, or compressed where the name ends in .xz."""
    content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
    return [msgspec.json.decode(line, type=Observed) for line in content.splitlines()]


def _nowhere(info: WorkerInfo) -> WorkerInfo:
    """Where it ran is nobody's business, and does not matter to the planner."""
    return msgspec.structs.replace(info, endpoint="", metrics_address="", pid=0)


async def _record(port: int, seconds: float, out: Path) -> None:
    started = time.monotonic()
    with out.open("wb") as lines:
        while (at := time.monotonic() - started) < seconds:
            workers = [(_nowhere(info), load) for info, load in freshest_loads(await fetch_status(port))]
            lines.write(msgspec.json.encode(Observed(round(at, 3), workers)) + b"\n")
            await asyncio.sleep(max(0.0, 1.0 - (time.monotonic() - started - at)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    asyncio.run(_record(arguments.port, arguments.seconds, arguments.out))


if __name__ == "__main__":
    main()
