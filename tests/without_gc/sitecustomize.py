"""On the PYTHONPATH of a cluster under test: its processes run without Python's cyclic garbage collector."""

import gc

gc.disable()
