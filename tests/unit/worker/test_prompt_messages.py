"""Every prompt that a worker cannot take gets an answer, whatever is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from tandem.engine.engine_config import EngineConfig
from tandem.engine.kv_cache.block_manager import BlockManager
from tandem.protocol.messages.dispatch import AbortAllAttempts, AttemptFailed, Ping, Pong, PrepareDecode, StartPrefill
from tandem.protocol.messages.packed import pack_token_ids
from tandem.protocol.messages.sampling import SamplingParams, StopConditions
from tandem.worker.serving_worker import ProxyAnswers, ServedModel
from tandem.worker.tandem_worker_config import TandemWorkerConfig
from tandem.worker.worker import Worker
from tandem.worker.worker_scheduler import WorkerScheduler

FIELDS: dict[str, Any] = {
    "proxy_id": "p", "attempt_ids": ["a", "b"], "transfer_id": "t", "token_ids": pack_token_ids([1, 2, 3]),
    "sampling": SamplingParams(), "seeds": [0, 1], "stop": StopConditions(5), "deadline_s": 9.0,
}  # fmt: skip
PROMPTS = [
    StartPrefill(**FIELDS, decode_worker_id=None, decode_epoch=None),
    PrepareDecode(**FIELDS, prefill_worker_id="w", prefill_epoch="e"),
]


async def not_loaded(*arguments: Any) -> NoReturn:
    raise NotImplementedError


def new_worker(grammars: Any, sent: list[tuple[bytes, Any]] | None = None) -> Any:
    """Returns a worker without an engine and without sockets. sent: gets its answers."""
    answers = [] if sent is None else sent
    router: Any = SimpleNamespace(send=lambda identity, message: not answers.append((identity, message)))
    worker: Any = Worker(TandemWorkerConfig("w", "any", "ipc:///unused", [], engine=EngineConfig("model")), not_loaded)
    worker._traffic = SimpleNamespace(destination=lambda message: (None, False))
    worker._host = SimpleNamespace(
        loaded=SimpleNamespace(has_head=True),
        grammars=grammars,
        adapters=SimpleNamespace(get=lambda adapter: None),
    )
    worker._scheduler = WorkerScheduler(BlockManager(8, 4), "m", 16, 4, lease_s=10.0)
    worker._model = ServedModel("engine", 100, 100, {}, "")
    worker._steps = SimpleNamespace(start=lambda: None)
    worker._answers = ProxyAnswers(router, "epoch", worker._metrics)
    return worker


async def test_all_attempts_of_one_proxy_end_together() -> None:
    worker = new_worker(SimpleNamespace(get=lambda *_: None))
    for number, proxy_id in enumerate(("p", "p", "q")):
        changes = {"proxy_id": proxy_id, "attempt_ids": [f"{number}"], "seeds": [0], "transfer_id": f"t{number}"}
        worker._on_message(b"", msgspec.structs.replace(PROMPTS[1], **changes))
    assert worker._scheduler.num_waiting == 3
    worker._on_message(b"", AbortAllAttempts("p"))
    assert worker._scheduler.num_waiting == 1 and not worker._scheduler.is_idle
    worker._on_message(b"", AbortAllAttempts("q"))
    assert worker._scheduler.is_idle
    worker._metrics.close()


async def test_a_ping_is_answered_on_its_connection_with_the_epoch() -> None:
    sent: list[tuple[bytes, Any]] = []
    worker = new_worker(SimpleNamespace(), sent)
    worker._on_message(b"p:0", Ping(7))
    assert sent == [(b"p:0", Pong("epoch", 7))]
    worker._metrics.close()


class BrokenGrammars:
    def get(self, text: str | None, client: str, is_optional: bool) -> None:
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("message", PROMPTS, ids=lambda message: type(message).__name__)
async def test_an_unexpected_error_fails_the_attempts(message: StartPrefill | PrepareDecode) -> None:
    sent: list[tuple[bytes, Any]] = []
    worker = new_worker(BrokenGrammars(), sent)
    worker._on_message(b"p:0", message)
    worker._metrics.close()
    assert worker._scheduler.is_idle
    assert all(identity == b"p:0" and isinstance(answer, AttemptFailed) for identity, answer in sent)
    assert [answer.attempt_id for _, answer in sent] == ["a", "b"]
    assert "can't start new thread" in sent[0][1].error.message


@pytest.mark.parametrize("message", PROMPTS, ids=lambda message: type(message).__name__)
async def test_a_model_without_an_output_head_generates_nothing(message: StartPrefill | PrepareDecode) -> None:
    sent: list[tuple[bytes, Any]] = []
    worker = new_worker(SimpleNamespace(get=lambda *_: None), sent)
    worker._host.loaded.has_head = False
    worker._on_message(b"p:0", message)
    worker._metrics.close()
    assert worker._scheduler.is_idle
    assert [answer.attempt_id for _, answer in sent] == ["a", "b"]
    assert sent[0][1].error.code == "invalid_request" and "no output head" in sent[0][1].error.message
