"""`python -m tandem.proxy CONFIG.json`. Exit code 2 for what the operator can mend, said in one line."""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path

import uvloop

from tandem.proxy.config import read_config
from tandem.runtime.errors import ConfigError
from tandem.runtime.lifetime import die_with_parent
from tandem.runtime.logs import setup_logging

_SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from the loop; Python's default is ten times that."""


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tandem.proxy CONFIG.json", file=sys.stderr)
        return 2
    die_with_parent(signal.SIGINT)
    try:
        config = read_config(Path(arguments[0]))
        setup_logging(config.proxy_id, config.log_level, config.log_format)
        # Imported late: they cost 2 s, and a wrong config should be told sooner.
        from tandem.proxy.reading.body_reader import BodyReader
        from tandem.proxy.reading.reader_pool import ReaderPool
        from tandem.proxy.server import serve
        from tandem.proxy.text.model_text import ModelText

        text = ModelText(config.model)
        options = (config.served_model_name, config.trust_request_chat_template, config.tool_call_parser)
        max_media = config.media.max_items if config.media_cache_endpoint else 0
        readers = ReaderPool(
            BodyReader(text, *options, max_media),
            partial(BodyReader.load, config.model, *options, max_media),
            config.tokenizer_threads,
        )
        readers.fork([*config.listen_fds, *config.admin_listen_fds])
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        uvloop.run(serve(config, text, readers))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    except Exception:
        logging.getLogger("proxy").exception("the proxy fails")
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    sys.stderr.flush()
    # Not sys.exit: a tokenising thread in the middle of a long prompt must not hold up the end of the process.
    os._exit(exit_code)
