"""What `bench.gpu.step_profile` reads from a profile: counts and times of each step."""

from __future__ import annotations

import torch

from bench.gpu.step_profile import STEP, TracedEvent, profile_steps, summarise


def step(start: float) -> list[TracedEvent]:
    """A step of 100 us: a copy, a graph of two kernels with a gap between them, a copy back, and a wait."""

    def device(name: str, begin: float, end: float) -> TracedEvent:
        return TracedEvent(name, True, start + begin, start + end)

    def host(name: str, begin: float, end: float) -> TracedEvent:
        return TracedEvent(name, False, start + begin, start + end)

    return [
        host(STEP, 0, 100), host("cudaMemcpyAsync", 1, 3), device("Memcpy HtoD (Pinned -> Device)", 10, 12),
        host("cudaGraphLaunch", 5, 8), device("gemm", 20, 40), device("attend_tokens", 42, 60),
        device("Memset (Device)", 58, 61), device("Memcpy DtoH (Device -> Pageable)", 70, 75),
        host("cudaStreamSynchronize", 30, 76), host("aten::mm", 4, 9),
    ]  # fmt: skip


def test_steps_are_summarised() -> None:
    found = summarise([*step(1000), *step(1150), TracedEvent("cudaDeviceSynchronize", False, 1400, 1401)])
    assert (found.num_kernels, found.num_copies, found.num_launches, found.num_waits) == (2, 2, 1, 1)
    assert found.device_ms == 0.065, "from the first copy to the end of the last"
    assert found.busy_ms == (2 + 20 + 19 + 5) / 1e3, "overlapping events count once"
    assert found.host_gap_ms == (1160 - 1075) / 1e3


def test_calls_are_profiled_without_a_gpu() -> None:
    calls = []
    found = profile_steps(lambda: calls.append(torch.ones(3).sum()), num_steps=4)
    assert len(calls) == 4 and found.num_kernels == 0
