"""A media process whose sandboxes end with some images: as `tandem.proxy.reading.media_program`.

An image whose bytes contain KILL ends the sandbox by a signal, HANG makes it compute for ever, and one with SLOW takes
longer than others.
"""

from __future__ import annotations

import signal
import time
from typing import Any

from tandem.runtime.garbage_collection import importing

SLOW_S = 0.3

if __name__ == "__main__":
    with importing():
        from tandem.proxy.media.processor import MediaProcessor
        from tandem.proxy.media.source import MediaSource
        from tandem.proxy.reading import media_process

    media_process._CPU_FACTOR, media_process._DEADLINE_FACTOR = 0.1, 100  # type: ignore[assignment]
    prepare = MediaProcessor.prepare

    def prepare_or_die(self: MediaProcessor, source: MediaSource, data: bytes) -> Any:
        if b"SLOW" in data:
            time.sleep(SLOW_S)
        if b"KILL" in data:
            signal.raise_signal(signal.SIGSEGV)
        while b"HANG" in data:
            pass
        return prepare(self, source, data)

    MediaProcessor.prepare = prepare_or_die  # type: ignore[method-assign]
    media_process.main()
