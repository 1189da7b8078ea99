"""`tandem scale prefill=2 decode=3`: changes the numbers of workers and waits until the change is complete."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from tandem.deploy.commands.cluster_client import ClusterClient
from tandem.protocol.messages.membership import StatusReport
from tandem.protocol.messages.operations import ClusterScaled, ScaleCluster
from tandem.runtime.errors import ConfigError, InternalError, Overloaded

POLL_S = 0.5
_OWN_NAME = re.compile(r"(prefill|decode)-\d+")
"""Names of the launcher's workers; those that joined from another host are called prefill-0-HOST."""


def parse_counts(arguments: Sequence[str]) -> ScaleCluster:
    """Parse `prefill=2`, `decode=3`. Raises ConfigError for anything else."""
    counts: dict[str, int] = {}
    for argument in arguments:
        role, equals, count = argument.partition("=")
        if role not in ("prefill", "decode") or not equals or not count.isascii() or not count.isdigit():
            raise ConfigError(f"cannot read {argument!r}; write prefill=N or decode=N")
        if role in counts:
            raise ConfigError(f"{role} is given twice")
        counts[role] = int(count[:6])
    return ScaleCluster(**counts)


async def scale(cluster: ClusterClient, arguments: Sequence[str], timeout_s: float) -> None:
    """Scale the cluster and wait for the workers; raises InternalError after `timeout_s`. 0 does not wait."""
    answer = await cluster.ask_launcher(parse_counts(arguments), ClusterScaled)
    text = f"prefill={answer.prefill} decode={answer.decode}"
    if not timeout_s:
        print(f"scaling to {text}")
        return
    try:
        async with asyncio.timeout(timeout_s):
            while not await _is_complete(cluster, answer):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        reason = f"the cluster has not reached {text} after {timeout_s:g} s; `tandem status` shows its workers"
        raise InternalError(reason) from None
    print(text)


async def _is_complete(cluster: ClusterClient, wanted: ClusterScaled) -> bool:
    try:
        return all(is_scaled(report, wanted) for report in await cluster.status())
    except Overloaded:  # the proxies are busy
        return False


def is_scaled(report: StatusReport, wanted: ClusterScaled) -> bool:
    """True when all wanted workers have registered, all their pairs are ready and no other worker is left.

    Workers that joined from other hosts do not count.
    """
    own = [worker for worker in report.workers if _OWN_NAME.fullmatch(worker.worker.worker_id)]
    names = {worker.worker.worker_id for worker in own}
    roles = [worker.worker.role for worker in own]
    num_pairs = sum(pair.state == "ready" and pair.decode_worker_id in names for worker in own for pair in worker.pairs)
    counts = roles.count("prefill"), roles.count("decode")
    return counts == (wanted.prefill, wanted.decode) and num_pairs == wanted.prefill * wanted.decode
