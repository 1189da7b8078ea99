"""Runs prompts in chunks, reports first tokens, ships KV. `python -m prefill_worker CONFIG.json`."""
