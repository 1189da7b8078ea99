"""A second tenant is served while another client attacks: no error, no long gap in its stream, no slow answer.

Nothing is left of the attack afterwards, and it costs the server a limited memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.attacks import ATTACKS, Attack, Server, run

pytestmark = [pytest.mark.extended, pytest.mark.alone]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with request.param.start(tmp_path_factory.mktemp("attacked")) as running:
        yield running


@pytest.mark.parametrize(
    ("server", "attack"), [pytest.param(each.kind, each, id=each.name) for each in ATTACKS], indirect=["server"]
)
def test_a_second_tenant_is_served_beside(server: Server, attack: Attack, tmp_path: Path) -> None:
    server.check()
    attack.check(run(attack, server, tmp_path))
    server.check()
