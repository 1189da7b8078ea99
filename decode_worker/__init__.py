"""Receives KV, runs continuous batching, streams tokens. `python -m tandem.decode_worker CONFIG.json`."""
