"""The process from which media processes are forked: `python -m tandem.proxy.reading.media_preload`.

It has imported what they need, which takes 4 s of CPU, and holds no model, thread or socket.
"""

from __future__ import annotations

from tandem.proxy.reading.media_messages import ENTRY
from tandem.runtime.garbage_collection import importing
from tandem.runtime.processes.fork_server import main_channel, serve_forks
from tandem.runtime.processes.forked_process import CHANNEL_FD

if __name__ == "__main__":
    with importing():
        from tandem.proxy.reading.media_process import run

    serve_forks(main_channel(CHANNEL_FD), {ENTRY: run})
