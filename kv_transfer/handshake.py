"""Decides whether two workers may pair, and by which connector. Pure. Refusals name the field and both values."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

from tandem.kv_transfer.connector import KVConnector
from tandem.kv_transfer.registry import AUTO, BUILT_IN, check_name, load_connector
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import KVLayout, OpenPair
from tandem.runtime.errors import ConfigError, KVLayoutMismatch

UNLIKE_NUMERICS = "with --exact, workers must compute alike"
"""Beginning of the reason for which exact workers refuse a pair."""


def offered_connectors(
    wanted: str, device: str, has_keys: bool = False, known: Collection[str] = BUILT_IN.keys()
) -> dict[str, KVConnector]:
    """Returns the connectors that a worker offers, in order of preference. wanted: a connector's name, or `auto`.

    has_keys: whether the cluster encrypts what leaves a host. Then `auto` offers no connector that sends KV between
    hosts in the clear, if the device has one that encrypts. known: the built-in connectors that the engine can use.
    Raises ConfigError for an unknown name, and for a connector that does not support the device.
    """
    check_name(wanted)
    usable = {name: each for name in known if device in (each := load_connector(name)).devices}
    if wanted == AUTO:
        is_safe = {name: each.encrypts for name, each in usable.items() if each.crosses_hosts}
        must_be_safe = has_keys and any(is_safe.values())
        return {name: each for name, each in usable.items() if is_safe.get(name, True) or not must_be_safe}
    connector = load_connector(wanted)
    if not connector.devices:
        raise ConfigError(
            f"connector {wanted!r} is not installed for {sys.executable}; install it there: pip install {wanted}"
        )
    if device not in connector.devices:
        raise ConfigError(
            f"connector {wanted!r} does not work on {device}; use {' or '.join(usable)} (--kv-connector auto chooses)"
        )
    return {wanted: connector}


def agree(
    message: OpenPair,
    layout: KVLayout,
    host_id: str,
    device: str,
    connectors: Mapping[str, KVConnector],
    exact: bool = False,
) -> str:
    """Chooses the connector of a pair: the first that prefill prefers, decode offers and that reaches decode's host.

    message: prefill's offer; the other arguments describe the decode worker. Whether a GPU reaches another one is
    known only when its memory is mapped. Workers of unequal numerics pair unless one of them is exact: an answer would
    then depend on where it was computed. Raises KVLayoutMismatch.
    """
    if message.version != PROTOCOL_VERSION:
        raise KVLayoutMismatch(f"protocol version differs: prefill has {message.version}, decode {PROTOCOL_VERSION}")
    if immovable := layout.immovable or message.layout.immovable:
        raise KVLayoutMismatch(f"the KV of this model does not move between workers: {immovable}")
    difference = layout.first_difference(message.layout)
    if difference is not None:
        field, ours, theirs = difference
        raise KVLayoutMismatch(f"KV layout differs in {field}: prefill has {theirs}, decode has {ours}")
    if (exact or message.exact) and (difference := layout.numerics.first_difference(message.layout.numerics)):
        field, ours, theirs = difference
        raise KVLayoutMismatch(f"{UNLIKE_NUMERICS}, but their {field} differs: prefill has {theirs}, decode has {ours}")
    same_host = message.host_id == host_id
    usable = [
        name
        for name in message.connectors
        if name in connectors and message.device == device and (same_host or connectors[name].crosses_hosts)
    ]
    if not usable:
        where = "on the same host" if same_host else "on different hosts"
        raise KVLayoutMismatch(
            f"no connector in common ({where}): prefill offers {', '.join(message.connectors)} on {message.device}, "
            f"decode offers {', '.join(connectors)} on {device}"
        )
    return usable[0]
