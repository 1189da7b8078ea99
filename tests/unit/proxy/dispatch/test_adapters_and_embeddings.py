"""Embeddings and LoRA adapters from the body of a request to the commands of workers, and back."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.protocol.messages.dispatch import AdapterRef, FirstToken, StartPrefill
from tandem.protocol.messages.membership import WorkerInfo
from tandem.protocol.messages.sampling import SampledToken
from tandem.proxy.answers.embeddings import EmbeddingAnswer, encode_embedding
from tandem.proxy.api.validation import BodyDecoder, ModelFormats, ModelNotFound
from tandem.proxy.cluster.adapter_table import AdapterTable, NamedAdapter
from tandem.proxy.cluster.worker_record import ModelLimits
from tandem.proxy.dispatch.generation import Generation
from tandem.proxy.proxy_settings import AdmissionSettings
from tandem.proxy.text.model_text import EmbeddingDefaults
from tandem.runtime.errors import InvalidRequest
from tandem.telemetry.request_log import RequestRecord
from tests.support.proxy_cluster import PREFILL, Cluster, played, turn, whole

REF = AdapterRef("a" * 64, "/adapters/a")
OTHER_PREFILL = WorkerInfo("prefill-1", "p2", "prefill", "ipc://p2", 3)
VALUES = np.array([3.0, 4.0], np.float32)


def answer(cluster: Cluster, **body: Any) -> asyncio.Task[bytes]:
    request = cluster.reader.read(json.dumps(body).encode(), "embedding", cluster.worker_table.limits())
    made = Generation(cluster.services, request, RequestRecord("r", "embedding"))
    return asyncio.ensure_future(whole(EmbeddingAnswer(made, "m")))  # type: ignore[arg-type]  # has the same methods


def report(cluster: Cluster, start: StartPrefill, worker: WorkerInfo, values: Any = VALUES) -> None:
    cluster.dispatcher.on_message(
        worker, FirstToken(start.attempt_ids[0], SampledToken(0), "length", 0.1, 0.1, embedding=values.tobytes())
    )


@played(workers=(PREFILL,))
async def test_embeddings_need_prefill_workers_only(cluster: Cluster) -> None:
    answering = answer(cluster, input=["abc", "de"], encoding_format="float")
    await turn()
    starts = [start for _, start in cluster.pool.of(StartPrefill)]
    assert [(start.pooling, start.decode_epoch, start.stop.max_tokens) for start in starts] == [("last", None, 1)] * 2
    report(cluster, starts[1], PREFILL, VALUES * np.array([-1, 1], np.float32))  # in any order
    report(cluster, starts[0], PREFILL)
    found = json.loads(await answering)
    assert [each["index"] for each in found["data"]] == [0, 1]
    np.testing.assert_allclose([each["embedding"] for each in found["data"]], [[0.6, 0.8], [-0.6, 0.8]], rtol=1e-6)
    assert (found["object"], found["model"], found["id"]) == ("list", "m", "embd-r")
    details = {"cached_tokens": 0, "multimodal_tokens": None}
    assert found["usage"] == {"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": details}
    cluster.check_nothing_is_left()


@played(workers=(PREFILL, OTHER_PREFILL))
async def test_an_embedding_is_computed_again_when_its_worker_is_lost(cluster: Cluster) -> None:
    answering = answer(cluster, input=[7, 8, 9], encoding_format="base64", normalize=False)
    await turn()
    [(worker_id, first)] = cluster.pool.of(StartPrefill)
    lost, left = (PREFILL, OTHER_PREFILL) if worker_id == "prefill-0" else (OTHER_PREFILL, PREFILL)
    cluster.lose(lost)
    await turn()
    second = cluster.pool.of(StartPrefill)[1][1]
    assert (second.pooling, second.token_ids) == ("last", first.token_ids)
    report(cluster, second, left)
    [found] = json.loads(await answering)["data"]
    assert np.frombuffer(base64.b64decode(found["embedding"]), "<f4").tolist() == [3.0, 4.0]
    cluster.check_nothing_is_left()


def decoder(defaults: EmbeddingDefaults = EmbeddingDefaults()) -> BodyDecoder:  # noqa: B008  # frozen
    table = AdapterTable(None, [NamedAdapter("sql", REF)], "base")
    return BodyDecoder("base", admission=AdmissionSettings(3), formats=ModelFormats(embedding=defaults), adapters=table)


def test_an_adapter_is_named_as_the_model() -> None:
    for body, kind in (
        (b'{"model": "sql", "prompt": "a"}', "completion"),
        (b'{"model": "sql", "messages": [{"role": "user", "content": "a"}]}', "chat"),
        (b'{"model": "sql", "input": "a"}', "embedding"),
    ):
        request = getattr(decoder(), kind)(body)
        assert request.adapter.ref == REF
        assert getattr(decoder(), kind)(body.replace(b'"sql"', b'"base"')).adapter is None
        with pytest.raises(ModelNotFound, match="'SQL' does not exist"):
            getattr(decoder(), kind)(body.replace(b'"sql"', b'"SQL"'))


@played()
async def test_prompts_of_different_adapters_have_different_hashes(cluster: Cluster) -> None:
    limits = ModelLimits(1000, 500, "m", 8)
    base = decoder().completion(b'{"model": "base", "prompt": "abcdefghijklmnop"}')
    tuned = decoder().completion(b'{"model": "sql", "prompt": "abcdefghijklmnop"}')
    hashes = [cluster.reader.render(request, limits).prompt.prompts[0].prefix_hashes for request in (base, base, tuned)]
    assert hashes[0] == hashes[1] != hashes[2] and len(hashes[0]) == 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": "yes"}, "normalize"),
        ({}, "input"),
    ],
)
def test_bad_fields_of_embeddings_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decoder().embedding(json.dumps(body).encode())
    assert caught.value.param == param


def test_dimensions_shorten_before_scaling(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 4, "is_matryoshka": true}')
    request = decoder(EmbeddingDefaults.read(tmp_path)).embedding(b'{"input": "a", "dimensions": 2}')
    assert request.embedding is not None
    packed = np.array([3, 4, 50, 60], np.float32).tobytes()
    assert encode_embedding(packed, request.embedding) == pytest.approx([0.6, 0.8])
