"""`python -m tandem.media_cache CONFIG.json`. Exits with 2 and a one-line message on an invalid configuration."""

from __future__ import annotations

import sys
from pathlib import Path

from tandem.media_cache.config import read_config
from tandem.media_cache.server import MediaCacheServer
from tandem.runtime.errors import ConfigError
from tandem.runtime.process import run_process

if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m tandem.media_cache CONFIG.json", file=sys.stderr)
        sys.exit(2)
    try:
        config = read_config(Path(sys.argv[1]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    run_process("media-cache", config.log_level, lambda: MediaCacheServer(config))
