"""Entry point: `python -m tandem.media_cache CONFIG.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.media_cache.server import MediaCacheServer
from tandem.runtime.processes.process import run_process


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=MediaCacheConfig)
    run_process("media-cache", config.logs, lambda: MediaCacheServer(config))


if __name__ == "__main__":
    main()
