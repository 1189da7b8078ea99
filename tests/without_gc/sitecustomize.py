"""On the PYTHONPATH of a cluster under test: its processes run without Python's cyclic garbage collector."""

import gc

gc.disable()
gc.enable = lambda: None  # type: ignore[assignment]
gc.collect = lambda generation=2: 0  # type: ignore[assignment]
