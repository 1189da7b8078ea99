"""Decides whether two workers may pair, and by which connector. Pure. Refusals name the field and both values."""

from __future__ import annotations

from tandem.kv_transfer.registry import AUTO, BUILT_IN, check_name, load_connector
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import KVLayout, OpenPair
from tandem.runtime.errors import ConfigError, KVLayoutMismatch


def offered_connectors(wanted: str, device: str, has_keys: bool = False) -> list[str]:
    """Returns the connectors that a worker offers, by preference. wanted: a connector's name, or `auto`.

    has_keys: whether the cluster encrypts what leaves a host. Then `auto` offers no connector that sends KV between
    hosts in the clear, if the device has one that encrypts.
    Raises ConfigError for an unknown name, and for a connector that does not support the device.
    """
    check_name(wanted)
    usable = [name for name in BUILT_IN if device in load_connector(name).devices]
    if wanted == AUTO:
        is_safe = {name: load_connector(name).encrypts for name in usable if load_connector(name).crosses_hosts}
        return [name for name in usable if is_safe.get(name, True) or not (has_keys and any(is_safe.values()))]
    if not load_connector(wanted).devices:
        raise ConfigError(f"connector {wanted!r} is not there; install it: pip install tandem-serve[{wanted}]")
    if device not in load_connector(wanted).devices:
        raise ConfigError(
            f"connector {wanted!r} does not work on {device}; use {' or '.join(usable)} (--kv-connector auto chooses)"
        )
    return [wanted]


def agree(message: OpenPair, layout: KVLayout, host_id: str, device: str, connectors: list[str]) -> str:
    """Chooses the connector of a pair: the first that prefill prefers, decode offers and that reaches decode's host.

    message: prefill's offer; the other arguments describe the decode worker. Whether a GPU reaches another one is
    known only when its memory is mapped. Raises KVLayoutMismatch.
    """
    if message.version != PROTOCOL_VERSION:
        raise KVLayoutMismatch(f"protocol version differs: prefill has {message.version}, decode {PROTOCOL_VERSION}")
    difference = layout.first_difference(message.layout)
    if difference is not None:
        field, ours, theirs = difference
        raise KVLayoutMismatch(f"KV layout differs in {field}: prefill has {theirs}, decode has {ours}")
    same_host = message.host_id == host_id
    usable = [
        name
        for name in message.connectors
        if name in connectors and message.device == device and (same_host or load_connector(name).crosses_hosts)
    ]
    if not usable:
        where = "on the same host" if same_host else "on different hosts"
        raise KVLayoutMismatch(
            f"no connector in common ({where}): prefill offers {', '.join(message.connectors)} on {message.device}, "
            f"decode offers {', '.join(connectors)} on {device}"
        )
    return usable[0]
