"""A fork server of readers that loads the model's text files itself: `python -m tandem.proxy.reading.reader_process`.

It serves a proxy whose own fork server, which shares what the proxy has loaded, was lost.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from tandem.proxy.proxy_config import ProxyConfig
from tandem.proxy.reading.body_reader import BodyReader
from tandem.proxy.reading.reader_pool import reader_entries
from tandem.runtime.garbage_collection import freeze_loaded_objects
from tandem.runtime.logs import setup_logging
from tandem.runtime.processes.fork_server import main_channel, serve_forks
from tandem.runtime.processes.forked_process import CHANNEL_FD, read_config


def main() -> NoReturn:
    config = msgspec.json.decode(read_config(), type=ProxyConfig)
    setup_logging(config.proxy_id, config.logs)
    reader = BodyReader.load(config)
    freeze_loaded_objects()
    serve_forks(main_channel(CHANNEL_FD), reader_entries(reader))


if __name__ == "__main__":
    main()
