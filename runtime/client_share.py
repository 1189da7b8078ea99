"""What one client may hold of something that all clients share: memory, files, places in a queue."""

from __future__ import annotations

from typing import Final

CLIENT_SHARE: Final = 0.75
"""The largest share. A client that is alone gets most of what there is, and another one finds the rest free."""
