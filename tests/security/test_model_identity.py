"""Workers whose weights differ must not exchange KV caches or embeddings, whatever the files are called and how large.

The usual case: the weights of a folder are replaced in place, and `tandem restart` restarts the workers one by one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tandem.engine.engine_config import EngineConfig, LoadFormat
from tandem.engine.loading import model_identity
from tandem.engine.loading.model_identity import SAMPLE_BYTES, folder_identity
from tandem.engine.loading.model_loader import load_model
from tandem.kv_transfer.handshake import agree
from tandem.media_cache.media_cache_config import MediaCacheConfig
from tandem.media_cache.media_client import MediaCacheClient
from tandem.media_cache.server import MediaCacheServer
from tandem.protocol.messages.membership import PROTOCOL_VERSION
from tandem.protocol.messages.transfer import KVLayout, OpenPair
from tandem.protocol.sockets import new_context
from tandem.runtime.errors import InternalError, KVLayoutMismatch
from tandem.worker.shared_embeddings import SharedEmbeddings
from tests.support.named_connectors import named

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model(saved_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_model, tmp_path / "model"))


def layout_of(folder: Path, load_format: LoadFormat = "auto") -> KVLayout:
    return load_model(EngineConfig(str(folder), device="cpu", load_format=load_format)).layout


def update_in_place(folder: Path) -> None:
    """Trains a little: other values, same names, types, shapes and file sizes."""
    tensors = load_file(folder / WEIGHTS)
    num_bytes = (folder / WEIGHTS).stat().st_size
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    assert (folder / WEIGHTS).stat().st_size == num_bytes


def test_workers_do_not_pair_after_the_weights_were_updated_in_place(model: Path) -> None:
    of_decode = layout_of(model)
    update_in_place(model)
    of_prefill = layout_of(model)
    offer = OpenPair(PROTOCOL_VERSION, "prefill-0", "epoch", [1], "d", "pair", of_prefill, "host", "cpu", ["ipc"])
    with pytest.raises(KVLayoutMismatch, match="model_id"):
        agree(offer, of_decode, "host", "cpu", named("ipc"))


def test_weights_of_the_older_format_count_as_well(model: Path) -> None:
    torch.save(load_file(model / WEIGHTS), model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()
    before = layout_of(model)
    weights = torch.load(model / "pytorch_model.bin", weights_only=True)
    torch.save({name: tensor + 0.01 for name, tensor in weights.items()}, model / "pytorch_model.bin")
    assert layout_of(model).model_id != before.model_id


def test_random_weights_never_pair_with_real_ones(model: Path) -> None:
    dummy = layout_of(model, "dummy")
    assert dummy.model_id != layout_of(model).model_id
    update_in_place(model)
    assert layout_of(model, "dummy") == dummy  # the files of the weights are not read


def test_separate_copies_pair(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    (copy / "README.md").write_text("downloaded as well")
    assert layout_of(copy) == layout_of(model)


def test_a_checkpoint_replaced_while_it_is_loaded_is_not_served(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker would have the old weights under the new identity, or a mixture."""
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def load_then_replace(*arguments: object, **options: object) -> object:
        loaded = from_pretrained(*arguments, **options)
        update_in_place(model)
        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_then_replace)
    with pytest.raises(InternalError, match="changed while they were loaded"):
        layout_of(model)


def test_embeddings_of_other_weights_are_not_found(tmp_path: Path) -> None:
    """The media cache outlives the workers that a rolling restart replaces."""
    digest, embedding = bytes(32), torch.ones(1, 2, 4)

    async def run() -> None:
        server = MediaCacheServer(MediaCacheConfig(f"ipc://{tmp_path}/cache.sock", 1 << 20))
        running = asyncio.create_task(server.run())
        context = new_context()

        def embeddings(model_id: str) -> SharedEmbeddings:
            return SharedEmbeddings(MediaCacheClient(context, f"ipc://{tmp_path}/cache.sock"), model_id)

        workers = old, new, also_old = embeddings("old"), embeddings("new"), embeddings("old")
        try:
            async with asyncio.timeout(60):
                old.set({digest: embedding})
                found: dict[bytes, torch.Tensor] = {}
                while not found:  # it is stored in the background; every call is a round trip
                    found = await also_old.get([digest])
                assert torch.equal(found[digest], embedding)
                assert await new.get([digest]) == {}
        finally:
            for worker in workers:
                worker.close()
            server.stop()
            await running
            context.destroy(linger=0)

    asyncio.run(run())


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of two tensors, treated as too large to be hashed whole; its header is 200 bytes long."""
    monkeypatch.setattr(model_identity, "FULL_HASH_BYTES", 0)
    header = {"a": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]},
              "b": {"dtype": "U8", "shape": [16], "data_offsets": [1 << 20, (1 << 20) + 16]}}  # fmt: skip
    packed = json.dumps(header).encode().ljust(200)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / WEIGHTS).write_bytes(len(packed).to_bytes(8, "little") + packed + bytes((1 << 20) + 16))
    yield tmp_path


@pytest.mark.parametrize(
    "offset",
    [0, SAMPLE_BYTES - 1, 1 << 19, (1 << 20) - 1, 1 << 20, (1 << 20) + 15],
    ids=["first byte", "first sample", "middle", "last byte", "small tensor", "end of the file"],
)
def test_samples_of_large_files_reach_every_tensor(large: Path, offset: int) -> None:
    before = folder_identity(large)
    with (large / WEIGHTS).open("r+b") as file:
        file.seek(208 + offset)
        file.write(b"\1")
    assert folder_identity(large) != before


def test_only_samples_of_large_files_are_read(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, num_bytes = os.pread, 0

    def counting(fd: int, count: int, offset: int) -> bytes:
        nonlocal num_bytes
        num_bytes += count
        return pread(fd, count, offset)

    monkeypatch.setattr(os, "pread", counting)
    folder_identity(large)
    assert num_bytes <= 208 + 3 * SAMPLE_BYTES + 3 * 16


def test_a_large_file_without_a_header_is_refused(large: Path) -> None:
    (large / WEIGHTS).write_bytes(b"\xff" * 1000)
    with pytest.raises(ValueError, match="header"):
        folder_identity(large)
