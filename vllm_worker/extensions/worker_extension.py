"""What Tandem adds to vLLM's worker class, of which every rank has an object."""

from __future__ import annotations

from tandem.vllm_worker.extensions.kv_ranks import KVRank
from tandem.vllm_worker.extensions.prompt_logits import SlicedPromptLogits
from tandem.vllm_worker.extensions.resumed_sequences import ResumedSequences

EXTENSION = "tandem.vllm_worker.extensions.worker_extension.WorkerExtension"
"""For `ParallelConfig.worker_extension_cls`."""


class WorkerExtension(ResumedSequences, SlicedPromptLogits, KVRank):
    """vLLM mixes it in. Its methods are called by `collective_rpc`."""
