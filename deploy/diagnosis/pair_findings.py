"""Pairs of workers that are not connected, or connected worse than they could be. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from tandem.deploy.diagnosis.observation import Observation, ObservedWorker
from tandem.deploy.diagnosis.wording import Finding, speed_text
from tandem.protocol.messages.membership import PairStatus

SLOW_SHARE = 0.33
"""A pair is slow if it moves less than this share of what the median of the others of its connector moves."""
MIN_SHIPMENTS = 10
"""Shipments from which on the bandwidth of a pair is compared."""


def pair_findings(observation: Observation) -> Iterator[Finding]:
    hosts = {worker.name: worker.info.host_id for worker in observation.workers}
    old = {worker.name for worker in observation.workers if len(worker.loads) == len(observation.samples)}
    for worker in observation.workers:
        for pair in worker.pairs:
            if pair.decode_worker_id in hosts:
                same_host = hosts[pair.decode_worker_id] == worker.info.host_id
                yield from _of_pair(worker, pair, same_host)
                if pair.state == "opening" and {worker.name, pair.decode_worker_id} <= old:
                    text = (
                        "has not opened while `tandem doctor` looked: no answer comes. The network between them is cut."
                    )
                    yield Finding("pair", f"The pair {worker.name} to {pair.decode_worker_id} {text}")
    yield from _slow(observation)


def _of_pair(worker: ObservedWorker, pair: PairStatus, same_host: bool) -> Iterator[Finding]:
    names = f"{worker.name} to {pair.decode_worker_id}"
    because = f": {pair.reason}" if pair.reason else ""
    if pair.state in ("refused", "failed"):
        yield Finding("pair", f"The pair {names} is {pair.state}{because}. No prompt of the one decodes on the other.")
    elif pair.state == "ready" and same_host and pair.connector != "ipc":
        if pair.reason:
            text = f"ipc could not be used ({pair.reason}), which between GPUs means that there is no peer access."
            yield Finding("no peer access", f"The pair {names} is on one host and ships by {pair.connector}: {text}")
        else:
            text = f"ships by {pair.connector}. --kv-connector auto uses ipc there, which copies through shared memory."
            yield Finding("slow connector", f"The pair {names} is on one host and {text}")
    elif pair.state == "ready" and pair.connector == "gloo":
        text = "by gloo. --kv-connector auto uses nixl or tcp between hosts, which are faster."
        yield Finding("slow connector", f"The pair {names} ships {text}")


def _slow(observation: Observation) -> Iterator[Finding]:
    connectors = {
        (worker.name, pair.decode_worker_id): pair.connector for worker in observation.workers for pair in worker.pairs
    }
    speeds = {}
    for worker in observation.workers:
        for pair in worker.pairs:
            shipped = observation.shipped(worker, pair.decode_worker_id)
            if shipped.num_shipments >= MIN_SHIPMENTS and shipped.shipping_s > 0:
                speeds[worker.name, pair.decode_worker_id] = shipped.num_bytes / shipped.shipping_s
    for (prefill, decode), speed in speeds.items():
        connector = connectors[prefill, decode]
        others = [each for key, each in speeds.items() if key != (prefill, decode) and connectors[key] == connector]
        if others and speed < SLOW_SHARE * (usual := median(others)):
            text = f"moves {speed_text(speed)} while blocks move; the median of the others by {connector} is"
            yield Finding("slow pair", f"The pair {prefill} to {decode} {text} {speed_text(usual)}.")
