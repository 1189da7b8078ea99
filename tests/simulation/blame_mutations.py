"""Faults in whom a proxy blames for a failure, whom it chooses, and in what damaged blocks leave behind."""

from __future__ import annotations

from tests.simulation.mutation import ATTEMPT, TABLE, TRANSFER, Mutation

SEQUENCE = "proxy/dispatch/sequence.py"

BLAME = (
    Mutation(
        "the worker that reports a failure is suspected",
        ATTEMPT,
        "suspects=[other for other in self.route.workers if other != worker]",
        "suspects=[worker]",
    ),
    Mutation(
        "a sequence that has decoded is blamed for deaths before",
        SEQUENCE,
        "            self.num_deaths = 0\n            self._lost_attempts.clear()\n",
        "            self._lost_attempts.clear()\n",
    ),
    Mutation(
        "attempts count as lost although their worker has left in order",
        SEQUENCE,
        "self.num_lost += not attempt.is_excused",
        "self.num_lost += 1",
    ),
    Mutation(
        "a prefill worker that has lost its last pair is chosen",
        TABLE,
        "        if bool(record.decode_peers) != had_peers:\n",
        "        if record.decode_peers and not had_peers:\n",
    ),
    Mutation(
        "a prefix in the pool does not count beside tiers",
        "proxy/cluster/router.py",
        "in_all = table.prefixes.depths(hashes, table.tier_prefixes)",
        "in_all = table.tier_prefixes.depths(hashes)",
    ),
    Mutation(
        "damaged blocks count as arrived",
        TRANSFER,
        "transfer.on_received(is_whole=False)\n",
        "transfer.on_received(is_whole=True)\n",
    ),
)
