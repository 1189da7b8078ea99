"""`python -m tandem.proxy.reading.media_program`: the media process, which imports for 4 s of CPU."""

from __future__ import annotations

from tandem.runtime.garbage_collection import importing

if __name__ == "__main__":
    with importing():
        from tandem.proxy.reading.media_process import main

    main()
