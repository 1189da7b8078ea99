"""The role prefill: which prompt tokens the next step computes. Pure; `worker/` runs it."""
