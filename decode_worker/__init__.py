"""Receives KV, runs continuous batching, streams tokens. `python -m decode_worker CONFIG.json`."""
