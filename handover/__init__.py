"""The hand-over of a sequence from the worker that computes its prompt to the one that decodes it, for every engine.

    outgoing.py    transfers that this worker sends, and the leases on their blocks
    incoming.py    transfers that this worker receives, and when their blocks may be reused
    actions.py     what both ask of the worker's shell
    outgoing_pairs.py, incoming_pairs.py  the connections to other workers
    kv_traffic.py  the shell: executes the actions of both directions, and reports the results

An engine owns the blocks. It takes part as `outgoing.SendingHolder` and `incoming.ReceivingHolder`, six methods that
say when blocks are needed, complete and free again. Tandem's schedulers (`prefill_worker`, `decode_worker`) are one
such holder, vLLM's engine (`vllm_worker.scheduler`) is another one.

The blocks of a prompt come in groups; all blocks of a group hold the same layers. Every engine has one group today.
"""
