"""Fixtures of paths over NCCL, on a device and with a NCCL that act late."""

from __future__ import annotations

import pytest
import torch
import torch.distributed

from tandem.kv_transfer.connectors import nccl_group
from tests.support.late_device import LateDevice, install
from tests.support.late_nccl import NCCLWorld


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice(0)
    install(device, monkeypatch)
    return device


@pytest.fixture
def without_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nccl_group.NCCL_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def nccl(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> NCCLWorld:
    world = NCCLWorld(device)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", world)
    return world
