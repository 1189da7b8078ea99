"""Views that must agree at rest: what each process knows of the others is compared with what these hold.

A view may be late while requests run and faults happen. Once nothing changes, each must become right by itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from tandem.protocol.messages.membership import DECODE_ROLES, PREFILL_ROLES
from tandem.protocol.prefix_hash import pack_short_hashes, unpack_short_hashes
from tandem.simulator.cluster import SimulatedCluster
from tandem.simulator.processes import SimulatedProxy, SimulatedVllmWorker, SimulatedWorker

View = tuple[str, object, object]
"""What is known, in words; as it is known; and the truth."""


def wrong_view(cluster: SimulatedCluster) -> str | None:
    """Returns the first view of a whole cluster that is wrong, or None."""
    return next((f"{what}: {_short(known, true)}" for what, known, true in _views(cluster) if known != true), None)


def _short(known: Any, true: Any) -> str:
    if isinstance(known, dict) and isinstance(true, dict):  # only what differs
        keys = [key for key in known.keys() | true.keys() if known.get(key) != true.get(key)]
        known, true = ({key: each.get(key) for key in sorted(keys, key=str)[:5]} for each in (known, true))
    return f"{str(known)[:300]} instead of {str(true)[:300]}"


def _views(cluster: SimulatedCluster) -> Iterator[View]:
    infos = {worker.presence.info.epoch: worker.presence.info for worker in cluster.workers.values()}
    for proxy in cluster.proxies.values():
        yield from _of_proxy(cluster, proxy, infos)
    incoming: defaultdict[str, set[str]] = defaultdict(set)
    for worker in cluster.workers.values():
        yield from _of_worker(cluster, worker, infos)
        for pair in worker.worker._traffic._outgoing_table.pairs():
            if pair.state == "ready":
                incoming[pair.peer.epoch].add(pair.pair_id)
    for name, worker in cluster.workers.items():
        known = {pair.pair_id for pair in worker.worker._traffic._incoming_table.pairs()}
        yield f"{name} on the pairs that lead to it", known, incoming[worker.presence.info.epoch]
    yield from _of_launcher(cluster, infos)


def _of_proxy(cluster: SimulatedCluster, proxy: SimulatedProxy, infos: dict[str, Any]) -> Iterator[View]:
    table, control, name = proxy.table, proxy.control, proxy.name
    yield f"{name} on workers", {info.epoch: info for info in table.workers()}, infos
    yield f"{name} on what it has announced", control._announced, infos
    yield f"{name} on the workers that it can order", control._identities.keys(), infos.keys()
    yield f"{name} on the workers that it can send to", control._connections._sockets.keys(), infos.keys()
    for roles, listed in ((PREFILL_ROLES, table.prefill_workers), (DECODE_ROLES, table.decode_workers)):
        of_role = {epoch for epoch, info in infos.items() if info.role in roles}
        yield f"{name} on workers to choose from", {each.worker.epoch for each in listed}, of_role
    gauges = {role: proxy.metrics.workers.labels(role)._value.get() for role in ("prefill", "decode", "any")}
    counts = Counter(info.role for info in infos.values())
    yield f"{name}'s gauge of workers", gauges, {role: counts[role] for role in gauges}
    yield f"{name}'s gauge of workers that do not answer", proxy.metrics.unanswered._value.get(), 0
    pools, tiers = dict[int, Iterable[bytes]](), dict[int, Iterable[bytes]]()
    for record in table._by_epoch.values():
        process = cluster.workers[record.worker.worker_id]
        scheduler, pairs = process.worker._scheduler, list(process.worker._traffic._outgoing_table.pairs())
        blocks, times, about = process.blocks, scheduler.step_times, f"{name} on {record.worker.worker_id}"
        pools[record.bit] = blocks._by_hash
        below = [] if process.runs_vllm else scheduler.tiers._tiers.values()
        tiers[record.bit] = [block_hash for tier in below for block_hash in tier.hashes]
        load, use = record.load, record.use
        yield f"{about}'s drain", record.draining, False
        held: object = (0, 0, 0, [], blocks.num_blocks, len(blocks._by_hash))
        told = (load.num_running, load.num_waiting, load.num_decoding, load.waiting_tokens,
                load.num_free_blocks, load.num_cached_blocks)  # fmt: skip
        yield f"{about}'s load", told, held
        assumed = use.num_sequences, use.prompts.total, use.num_free_blocks, round(use.itl_s(1), 9)
        yield f"the use that {about} assumes", assumed, (0, 0, blocks.num_blocks, round(times.decode_s(1), 9))
        known = {pair.decode_epoch: pair.state for pair in record.pairs.all()}
        yield f"{about}'s pairs", known, {pair.peer.epoch: pair.state for pair in pairs}
        shipped = {pair.peer.worker_id: pair.num_shipments for pair in pairs if pair.num_shipments}
        traffic = {each.decode_worker_id: each.num_shipments for each in record.pairs.traffic()}
        yield f"{about}'s traffic", {peer: traffic.get(peer) for peer in shipped}, shipped
        is_elastic = {record.worker.epoch} if record.role == "any" else set[str]()
        peers = {pair.peer.epoch for pair in pairs if infos[pair.peer.epoch].role in DECODE_ROLES} | is_elastic
        if record.role in PREFILL_ROLES:
            yield f"{about}'s decode peers", record.decode_peers.keys(), peers
    yield f"{name} on prefixes in pools", table.prefixes._workers, _index(pools)
    yield f"{name} on prefixes in tiers", table.tier_prefixes._workers, _index(tiers)


def _index(held: dict[int, Iterable[bytes]]) -> dict[int, int]:
    """Returns the index of these blocks by the bits of the workers that hold them, see `PrefixIndex`."""
    index: defaultdict[int, int] = defaultdict(int)
    for bit, hashes in held.items():
        for short in unpack_short_hashes(pack_short_hashes(dict.fromkeys(hashes))):
            index[short] |= 1 << bit
    return index


def _of_worker(cluster: SimulatedCluster, worker: SimulatedWorker, infos: dict[str, Any]) -> Iterator[View]:
    name, links, own = worker.name, worker.presence._registration, worker.presence.info
    yield f"{name} on workers", links._view, infos
    proxies = {proxy.control._socket.endpoint: proxy for proxy in cluster.proxies.values()}
    for link in links._links:
        proxy = proxies[link.endpoint]
        about = f"{name} on {proxy.name}"
        yield f"{about}, its process", (link.proxy_id, link.known_by), (proxy.proxy_id, proxy.proxy_id)
        yield f"{about}, its version of the view", link.version, proxy.control._version
        yield f"{about}, its workers", link.workers, infos
    traffic, scheduler = worker.worker._traffic, worker.worker._scheduler
    pairs = {pair.peer.epoch: pair.peer.worker_id for pair in traffic._outgoing_table.pairs() if pair.state == "ready"}
    known = {epoch: name for epoch, name in pairs.items() if epoch in infos and infos[epoch].role in DECODE_ROLES}
    wanted = {each.epoch: each.worker_id for each in infos.values() if each.role in DECODE_ROLES and each != own}
    if own.role in PREFILL_ROLES:
        yield f"{name} on the pairs that it needs", known, wanted
    yield (
        f"{name} on the senders of its pairs",
        traffic._outgoing._senders.keys(),
        traffic._outgoing_table._by_id.keys(),
    )
    left: dict[str, Iterable[object]] = {
        "leases": worker.outgoing._leases._leases,
        "transfers out": worker.outgoing._by_id, "transfers in": worker.incoming._by_id,
    }  # fmt: skip
    if isinstance(worker, SimulatedVllmWorker):
        policy: Any = worker.worker._scheduler
        left |= {"streams": policy._streams._by_key, "requests": worker.vllm.requests}
        left |= {"requests that ship": policy._leaving, "requests that receive": policy._arriving}
    else:
        prefill, decode = scheduler.prefill, scheduler.decode
        left |= {"attempts": prefill.prompts.by_attempt, "waits for tiers": scheduler.tiers._waits}
        left["reservations"] = decode.reservations._reserved
    yield f"{name} on what has ended", {what: list(each) for what, each in left.items() if each}, {}


def _of_launcher(cluster: SimulatedCluster, infos: dict[str, Any]) -> Iterator[View]:
    launcher = cluster.launcher.launcher
    heard = {report.worker.epoch: report.worker for _, report in launcher._reports._heard.values()}
    yield "the launcher on workers", heard, infos
    ids = {name: report.proxy_id for name, report in launcher._reports._last.items()}
    yield "the launcher on proxies", ids, {name: proxy.proxy_id for name, proxy in cluster.proxies.items()}
    yield "the launcher on its orders", list(launcher._orders._orders), []
