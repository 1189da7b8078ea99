"""One fault that is put into the product, and the files that such faults change."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """what: the fault, in words. file: relative to the root."""

    what: str
    file: str
    old: str
    new: str


TRAFFIC = "handover/kv_traffic.py"
OUTGOING_TABLE, INCOMING_TABLE = "handover/outgoing_pairs.py", "handover/incoming_pairs.py"
PRESENCE, WORKER = "worker/presence.py", "worker/worker.py"
CONTROL, DISPATCHER, ATTEMPT = "proxy/control.py", "proxy/dispatch/dispatcher.py", "proxy/dispatch/sequence.py"
GENERATION = "proxy/dispatch/generation.py"
DECODE, TRANSFER, PREFILL = (
    "decode_worker/decode_scheduler.py",
    "handover/incoming.py",
    "prefill_worker/prefill_scheduler.py",
)
TABLE, PROMPTS = "proxy/cluster/worker_table.py", "prefill_worker/prompt.py"
KNOWN_PAIRS = "proxy/cluster/worker_record.py"
INDEX, LOAD = "proxy/cluster/worker_table.py", "proxy/cluster/worker_record.py"
SEQUENCES, SHIPMENT = "decode_worker/sequence.py", "handover/outgoing.py"
LAUNCHER, ROLES, SUPERVISOR = (
    "deploy/launch/launcher.py",
    "deploy/launch/worker_roles.py",
    "deploy/processes/supervisor.py",
)
