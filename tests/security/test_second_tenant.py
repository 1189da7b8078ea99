"""A second tenant is served while another client attacks: no error, no long gap in its stream, no slow answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.attacker import Attack, Attacker
from tests.security.attacks import ATTACKS
from tests.security.file_attacks import FILE_ATTACKS
from tests.security.second_tenant import Plan, SecondTenant
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.extended, pytest.mark.alone]

MAX_LATENCY_S = 10.0
"""For first events, large prompts and polls: a share of the readers, on a machine that does other work."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tenants")
    keys = folder / "keys"
    keys.write_text("key-of-the-attacker attacker\nkey-of-the-tenant tenant\n")
    flags = ("--api-keys-file", str(keys), "--data-dir", str(folder / "data"), "--max-waiting-requests", "4096")
    with Cluster(*flags, "--max-body-mib", "64", "--kv-cache-gib", "0.25") as running:
        yield running


@pytest.mark.parametrize("attack", [*ATTACKS, *FILE_ATTACKS], ids=lambda attack: attack.name)
def test_a_second_tenant_is_served_beside(attack: Attack, cluster: Cluster, tmp_path: Path) -> None:
    cluster.wait_for(cluster.is_healthy)
    plan = Plan(cluster.url, "key-of-the-tenant", runs_batches=True, polled=("/live", "/v1/files", "/v1/batches"))
    with SecondTenant(plan, cluster.launcher_pid) as tenant:
        attack.run(Attacker(cluster, "key-of-the-attacker", tmp_path))
    print(f"\n{attack.name}: {tenant.verdict}")
    tenant.verdict.check(attack.max_gap_s, MAX_LATENCY_S, attack.max_grown_bytes, attack.max_batch_s)
