"""Pure: may these two workers pair, and by which connector? A refusal names the field and both values."""

from __future__ import annotations

from kv_transfer.registry import AUTO, BUILT_IN, check_name, reach_of
from protocol.errors import ConfigError, KVLayoutMismatch
from protocol.membership import PROTOCOL_VERSION
from protocol.transfer import KVLayout, OpenPair


def offered_connectors(wanted: str, device: str) -> list[str]:
    """The connectors that a worker can use, by preference. wanted: a connector's name, or `auto`.

    Raises ConfigError for a name that nobody knows, and for a connector that the device rules out.
    """
    check_name(wanted)
    able = [name for name, reach in BUILT_IN.items() if device in reach.devices]
    if wanted == AUTO:
        return able
    if device not in reach_of(wanted).devices:
        raise ConfigError(
            f"connector {wanted!r} does not work on {device}; use {' or '.join(able)} (--kv-connector auto chooses)"
        )
    return [wanted]


def agree(message: OpenPair, layout: KVLayout, host_id: str, device: str, connectors: list[str]) -> str:
    """The connector for the pair: the prefill side's first choice that we offer too and that can reach us.

    Raises KVLayoutMismatch.
    """
    if message.version != PROTOCOL_VERSION:
        raise KVLayoutMismatch(f"protocol version differs: prefill has {message.version}, decode {PROTOCOL_VERSION}")
    difference = layout.first_difference(message.layout)
    if difference is not None:
        field, ours, theirs = difference
        raise KVLayoutMismatch(f"KV layout differs in {field}: prefill has {theirs}, decode has {ours}")
    same_host = message.host_id == host_id
    usable = [name for name in message.connectors if name in connectors and (same_host or reach_of(name).crosses_hosts)]
    if not usable:
        where = "on the same host" if same_host else "on different hosts"
        raise KVLayoutMismatch(
            f"no connector in common ({where}): prefill offers {', '.join(message.connectors)} on {message.device}, "
            f"decode offers {', '.join(connectors)} on {device}"
        )
    return usable[0]
