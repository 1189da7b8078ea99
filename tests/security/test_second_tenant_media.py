"""A second tenant's pictures are served while another client fills the media cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.attacker import Attack, Attacker
from tests.security.media_attacks import CACHE_MIB, MEDIA_ATTACKS
from tests.security.second_tenant import Plan, SecondTenant
from tests.support.cluster import MODEL, Cluster
from tests.support.media_proxy import data_url
from tests.support.vision_model import encoded, picture, save_model

pytestmark = [pytest.mark.extended, pytest.mark.alone]

MAX_LATENCY_S = 30.0
"""The tenant's pictures take turns with the attacker's prompts, which are long."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("pictures")
    keys = folder / "keys"
    keys.write_text("key-of-the-attacker attacker\nkey-of-the-tenant tenant\n")
    model = save_model(tmp_path_factory.mktemp("vision"))
    flags = ["--model", str(model), "--served-model-name", MODEL, "--api-keys-file", str(keys)]
    flags += ["--media-cache-mib", str(CACHE_MIB), "--kv-cache-gib", "0.25", "--max-waiting-requests", "4096"]
    with Cluster(*flags) as running:
        yield running


@pytest.mark.parametrize("attack", MEDIA_ATTACKS, ids=lambda attack: attack.name)
def test_a_second_tenants_pictures_are_served_beside(attack: Attack, cluster: Cluster, tmp_path: Path) -> None:
    cluster.wait_for(cluster.is_healthy)
    shown = data_url(encoded(picture(70, 70, seed=1)))
    plan = Plan(cluster.url, "key-of-the-tenant", large_prompt_bytes=20_000, stream_tokens=300, picture=shown)
    with SecondTenant(plan, cluster.launcher_pid) as tenant:
        attack.run(Attacker(cluster, "key-of-the-attacker", tmp_path))
    print(f"\n{attack.name}: {tenant.verdict}")
    tenant.verdict.check(attack.max_gap_s, MAX_LATENCY_S, attack.max_grown_bytes, attack.max_batch_s)
