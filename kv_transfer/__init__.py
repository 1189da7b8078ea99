"""Moves KV cache blocks from a prefill worker's pool to a decode worker's pool.

This package knows blocks, bytes and peers. It knows nothing of requests, schedulers or models.
"""
