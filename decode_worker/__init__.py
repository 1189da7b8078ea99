"""The decode role of Tandem's engine: who gets blocks, and which sequences a step computes. Pure.

Workers with another engine (`vllm_worker`) have its scheduler in place of this package. What brings a prompt's KV here
is in `handover`, for every engine.
"""
