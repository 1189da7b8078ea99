"""The prefill role of Tandem's engine: which prompts compute when, chunk by chunk. Pure.

Workers with another engine (`vllm_worker`) have its scheduler in place of this package. What moves a prompt's KV to the
worker that decodes it is in `handover`, for every engine.
"""
