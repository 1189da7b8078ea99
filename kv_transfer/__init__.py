"""Moves blocks of the KV cache from a prefill worker's pool to a decode worker's pool, one pair at a time.

It knows blocks, bytes and peers; it knows nothing of requests, schedulers or models.
"""
