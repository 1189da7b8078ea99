"""Computes prompts in chunks, reports first tokens, ships KV. `python -m tandem.prefill_worker CONFIG.json`."""
