"""Faults in the policy of workers with vLLM's engine, which some seeds run in place of Tandem's schedulers."""

from __future__ import annotations

from tests.simulation.mutation import Mutation

POLICY = "vllm_worker/scheduler/vllm_scheduler.py"

VLLM = (
    Mutation(
        "vLLM never gets the blocks of a shipped prompt back",
        POLICY,
        "        return [EndShipping(transfer.prompt)]\n",
        "        return []\n",
    ),
    Mutation(
        "vLLM never gets the blocks of a prompt that was given up back",
        POLICY,
        "        return [EndReceiving(prompt.engine_id)]  #",
        "        return []  #",
    ),
    Mutation(
        "vLLM goes on waiting for the KV of a prompt that was given up",
        POLICY,
        "return [*failed, AbortRequests([prompt.engine_id])] if prompt.engine_id else failed",
        "return failed",
    ),
    Mutation(
        "a prompt that vLLM has preempted is shipped from blocks that are no longer its own",
        POLICY,
        "                actions += self._preempt(leaving)\n",
        "                pass\n",
    ),
    Mutation(
        "with vLLM, sequences go on from the first token of another one",
        POLICY,
        "            token_id = first_tokens[stream.attempt_id]\n            stream.num_generated += 1\n",
        "            token_id = transfer.first_token_ids[0]\n            stream.num_generated += 1\n",
    ),
    Mutation(
        "with vLLM, a prompt keeps its blocks while its sequences wait behind one that needs them",
        POLICY,
        "            yielding = self.outgoing.without_tokens(now)\n",
        "            pass\n",
    ),
    Mutation(
        "two full workers with vLLM wait for each other",
        POLICY,
        "yielding = self.outgoing.unanswered(now) if self.incoming.is_blocked or is_short else None",
        "yielding = None",
    ),
    Mutation(
        "with vLLM, sequences that another worker continues are never forgotten",
        POLICY,
        "        if not transfer.ended:  # decode continues the sequences\n",
        "        if False:\n",
    ),
    Mutation(
        "with vLLM, the request of a sequence that has ended goes on",
        POLICY,
        "        if stream.owns_request:\n",
        "        if False:\n",
    ),
    Mutation(
        "shipped prompts keep their blocks while vLLM takes those of their other sequences again and again",
        POLICY,
        "            self._preempted_at = now\n",
        "            pass\n",
    ),
    Mutation(
        "a sequence goes on when the blocks of its first group are there",
        "handover/incoming.py",
        "            and all(group.is_announced for group in self.groups)\n",
        "            and self.groups[0].is_announced\n",
    ),
    Mutation(
        "blocks may be reused when the first group has arrived",
        "handover/incoming.py",
        "        all_announced = all(group.is_announced for group in self.groups)\n",
        "        all_announced = self.groups[0].is_announced\n",
    ),
    Mutation(
        "blocks of a window go to the places of full attention",
        "handover/outgoing.py",
        "        return Ship(pair_id, transfer_id, first, src, dst, group)\n",
        "        return Ship(pair_id, transfer_id, first, src, dst, 0)\n",
    ),
    Mutation(
        "blocks are written in the places of each other",
        "handover/outgoing.py",
        "        dst = self.dst_block_ids[first - self.first_block : ready - self.first_block]\n",
        "        dst = self.dst_block_ids[first - self.first_block : ready - self.first_block][::-1]\n",
    ),
)
