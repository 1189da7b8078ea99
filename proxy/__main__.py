"""`python -m tandem.proxy CONFIG.json`. Exits with code 2 and a one-line message for a wrong configuration."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import uvloop

from tandem.runtime.errors import ConfigError
from tandem.runtime.garbage_collection import importing
from tandem.runtime.logs import setup_logging
from tandem.runtime.processes.forked_process import ONE_THREAD
from tandem.runtime.processes.lifetime import die_with_parent


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tandem.proxy CONFIG.json", file=sys.stderr)
        return 2
    die_with_parent(signal.SIGINT)
    os.environ |= ONE_THREAD
    from tandem.proxy.proxy_config import read_config  # imports numpy

    try:
        config = read_config(Path(arguments[0]))
        setup_logging(config.proxy_id, config.logs)
        # Imported late: the imports take 2 s, and a wrong configuration should be reported sooner.
        with importing():
            from tandem.proxy.reading.body_reader import BodyReader
            from tandem.proxy.reading.reader_pool import ReaderPool
            from tandem.proxy.server import serve
            from tandem.proxy.text.model_text import ModelText

        text = ModelText(config.model, config.requests.generation_config, config.requests.chat_template)
        # One more, because one client's requests never hold all of them.
        readers = ReaderPool(BodyReader(text, config), config, config.reader_processes + 1)
        readers.fork()
        uvloop.run(serve(config, text, readers))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    except Exception:
        logging.getLogger("proxy").exception("the proxy failed")
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit, which would wait for a thread that tokenises a long prompt.
    os._exit(exit_code)
