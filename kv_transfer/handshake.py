"""Decides whether two workers may pair, and by which connector. Pure. Refusals name the field and both values."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.kv_transfer.ranks.head_slices import head_routes
from tandem.kv_transfer.registry import AUTO, BUILT_IN, check_name, load_connector
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import KVLayout, OpenPair
from tandem.runtime.errors import ConfigError, KVLayoutMismatch


def offered_connectors(wanted: str, device: str) -> list[str]:
    """Returns the connectors that a worker offers, by preference. wanted: a connector's name, or `auto`.

    Raises ConfigError for an unknown name, and for a connector that does not support the device.
    """
    check_name(wanted)
    usable = [name for name in BUILT_IN if device in load_connector(name).devices]
    if wanted == AUTO:
        return usable
    if device not in load_connector(wanted).devices:
        raise ConfigError(
            f"connector {wanted!r} does not work on {device}; use {' or '.join(usable)} (--kv-connector auto chooses)"
        )
    return [wanted]


def agree(
    message: OpenPair,
    layout: KVLayout,
    host_id: str,
    device: str,
    connectors: list[str],
    device_ids: Sequence[str] = (),
) -> str:
    """Chooses the connector of a pair: the first that prefill prefers, decode offers and that reaches decode's pool.

    message: prefill's offer; the other arguments describe the decode worker. device_ids: GPUs of its ranks, as in
    OpenPair. Raises KVLayoutMismatch.
    """
    if message.version != PROTOCOL_VERSION:
        raise KVLayoutMismatch(f"protocol version differs: prefill has {message.version}, decode {PROTOCOL_VERSION}")
    difference = layout.first_difference(message.layout)
    if difference is not None:
        field, ours, theirs = difference
        raise KVLayoutMismatch(f"KV layout differs in {field}: prefill has {theirs}, decode has {ours}")
    same_host = message.host_id == host_id
    same_devices = _same_devices(message, layout, device_ids)
    usable = [
        name
        for name in message.connectors
        if name in connectors
        and (same_host or load_connector(name).crosses_hosts)
        and (same_devices or load_connector(name).crosses_devices)
    ]
    if not usable:
        where = "on different hosts"
        if same_host:
            where = "on the same host" if same_devices else "on different GPUs of the same host"
        raise KVLayoutMismatch(
            f"no connector in common ({where}): prefill offers {', '.join(message.connectors)} on {message.device}, "
            f"decode offers {', '.join(connectors)} on {device}"
        )
    return usable[0]


def _same_devices(message: OpenPair, layout: KVLayout, device_ids: Sequence[str]) -> bool:
    """Whether every path starts and ends on the same device. Ranks on CPU have no device id and always match."""
    routes = head_routes(layout.total_kv_heads, message.layout.tensor_parallel_size, layout.tensor_parallel_size)
    theirs, ours = dict(enumerate(message.device_ids)), dict(enumerate(device_ids))
    return all(theirs.get(route.src_rank, "") == ours.get(route.dst_rank, "") for route in routes)
