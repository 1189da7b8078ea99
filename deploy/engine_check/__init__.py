"""Proves an engine on this host, for `tandem engine check` (docs/vllm.md#first-hour-on-gpus)."""
