"""The preloaded process of media processes that end with some images: as `tandem.proxy.reading.media_preload`.

An image whose bytes contain KILL ends the process by a signal, one with SLOW takes longer than others.
"""

from __future__ import annotations

import signal
import time

from tandem.proxy.reading.media_messages import ENTRY
from tandem.runtime.garbage_collection import importing
from tandem.runtime.processes.fork_server import main_channel, serve_forks
from tandem.runtime.processes.forked_process import CHANNEL_FD

SLOW_S = 0.3

if __name__ == "__main__":
    with importing():
        from tandem.protocol.messages.media_cache import CommittedMedia
        from tandem.proxy.reading.media_process import run
        from tandem.proxy.reading.media_reader import MediaContent, MediaReader

    write = MediaReader.write

    def write_or_die(self: MediaReader, content: MediaContent, segment: str) -> CommittedMedia:
        if b"SLOW" in content.data:
            time.sleep(SLOW_S)
        if b"KILL" in content.data:
            signal.raise_signal(signal.SIGSEGV)
        return write(self, content, segment)

    MediaReader.write = write_or_die  # type: ignore[method-assign]
    serve_forks(main_channel(CHANNEL_FD), {ENTRY: run})
