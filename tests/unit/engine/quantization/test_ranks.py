"""Ranks share quantised layers: their shares make up the whole layer, and two ranks equal one in whole models."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.engine.engine_config import EngineConfig
from tandem.engine.layers.fusing import MixingAttention
from tandem.engine.loading.model_loader import load_model
from tandem.engine.quantization.linears import FP8, QuantizedLinear
from tandem.engine.quantization.schemes import GPTQ_V1_ZEROS, W8A8, Awq, Gptq, LayerShare, PackedInts, Scheme
from tandem.runtime.errors import ConfigError
from tests.support.quantised_checkpoints import Format, awq, gptq, make_checkpoint, packed, w8a8
from tests.unit.engine.quantization.test_checkpoints import FORMATS, save_with_biases
from tests.unit.engine.test_engine_parity import COMMON

CPU = torch.device("cpu")
SIZES = COMMON | {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32}
HEAD = "int8 head"
FORMS = FORMATS | {"awq, a group of two ranks": awq(group_size=128), HEAD: w8a8("int", ignore=[])}
ONLINE = ("online int8", "online fp8")
NAMES = (*FORMS, *ONLINE)
TOKENS = [3, 7, 11, 200, 5, 90, 91, 4]


@given(
    num_groups=st.integers(1, 12),
    group_size=st.sampled_from([0, 1, 4, 32, 96, 128]),
    num_ranks=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_the_ranks_inputs_keep_their_groups(num_groups: int, group_size: int, num_ranks: int) -> None:
    in_features = num_groups * (group_size or 6) * num_ranks // (num_ranks if num_groups % num_ranks == 0 else 1)
    found: list[int] = []
    for rank in range(num_ranks):
        share = LayerShare(in_features, 8, "inputs", rank, num_ranks)
        assert share.uneven() == "" and len(share.outputs) == 8
        groups = share.groups(group_size)
        run, rest = divmod(len(share.inputs), len(groups))
        assert rest == 0
        found += [group for group in groups for _ in range(run)]
    assert found == [each // (group_size or in_features) for each in range(in_features)]


def scheme_and_format(name: str, group_size: int) -> tuple[Scheme, Format]:
    stored = -1 if group_size == 0 else group_size
    made: dict[str, tuple[Scheme, Format]] = {
        "awq": (Awq(group_size), awq(group_size=stored)),
        "gptq": (Gptq(group_size, GPTQ_V1_ZEROS, False), gptq(group_size=stored, sym=False)),
        "int4": (PackedInts(4, group_size, True, False), packed(group_size=stored, symmetric=False)),
        "int8 weights": (PackedInts(8, group_size, False, False), packed(bits=8, group_size=stored)),
        "int8": (W8A8(torch.int8, False, False), w8a8("int")),
        "fp8 static": (W8A8(FP8, True, True), w8a8("float", strategy="tensor", static=True)),
    }
    return made[name]


@given(
    name=st.sampled_from(["awq", "gptq", "int4", "int8 weights", "int8", "fp8 static"]),
    group_size=st.sampled_from([0, 32, 64, 96]),
    num_groups=st.integers(1, 4),
    num_outputs=st.integers(1, 3),
    num_ranks=st.integers(2, 3),
    split=st.sampled_from(["inputs", "outputs"]),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_shares_make_up_the_layer(
    name: str, group_size: int, num_groups: int, num_outputs: int, num_ranks: int, split: Any, seed: int
) -> None:
    """Where ranks share a group, too: the number of inputs is not always a multiple of ranks times `group_size`."""
    in_features = num_groups * (group_size or 32) * (1 if num_groups % num_ranks == 0 else num_ranks)
    out_features = 16 * num_outputs * num_ranks
    generator = torch.Generator().manual_seed(seed)
    scheme, form = scheme_and_format(name, group_size)
    stored, weight, how = form.quantise(torch.randn(out_features, in_features, generator=generator), generator)
    specs = scheme.tensors(in_features, out_features)
    rows = torch.randn(5, in_features, generator=generator)
    results = []
    for rank in range(num_ranks):
        share = LayerShare(in_features, out_features, split, rank, num_ranks)
        if split == "inputs" and len(share.inputs) % 32:
            assert name.startswith(("int8", "fp8")) or "not a multiple of 32" in scheme.problem(
                share, CPU, torch.float32
            )
            return
        assert scheme.problem(share, CPU, torch.float32) == ""
        slices = {}
        for key, spec in specs.items():
            dim = spec.input_dim if split == "inputs" else spec.output_dim
            slices[key] = stored[key] if dim is None else stored[key].chunk(num_ranks, dim)[rank]
        with torch.inference_mode():
            layer = scheme.make(slices, share, None, torch.float32)
            own = rows[:, share.inputs.start : share.inputs.stop]
            results.append(layer(own))
            wanted = (own if how is None else how.rounded(own)) @ weight[
                share.outputs.start : share.outputs.stop, share.inputs.start : share.inputs.stop
            ].T
        torch.testing.assert_close(results[-1], wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()) + 1e-6)
    whole = sum(results) if split == "inputs" else torch.cat(results, -1)
    assert isinstance(whole, torch.Tensor) and whole.shape == (5, out_features)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases in some layers, all of them with 128 inputs, of which each of two ranks may have 64."""
    return save_with_biases(tmp_path_factory.mktemp("plain"), SIZES)


@pytest.fixture(scope="module")
def folders(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("formats")
    made = {
        name: make_checkpoint(plain, root / name, form, () if name == HEAD else ("lm_head",)).folder
        for name, form in FORMS.items()
    }
    return made | dict.fromkeys(ONLINE, plain)


def logits_of(name: str, folder: Path, num_ranks: int) -> torch.Tensor:
    """Returns [num_tokens, vocab_size], of each token of `TOKENS`."""
    quantization: Any = name.removeprefix("online ") if name.startswith("online") else "auto"
    loaded = load_model(
        EngineConfig(str(folder), "float32", device="cpu", quantization=quantization, tensor_parallel_size=num_ranks)
    )
    inputs = {"input_ids": torch.tensor([TOKENS]), "position_ids": torch.arange(len(TOKENS))[None]}
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(**inputs, use_cache=False, tandem=MixingAttention()).logits[0]
    return logits


def run_rank(rank: int, folder: Path, folders: dict[str, Path]) -> None:
    """Computes the logits of each checkpoint as one of two ranks, and saves them."""
    os.environ |= {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    store = FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.save({name: logits_of(name, each, 2) for name, each in folders.items()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two_ranks(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The logits of each checkpoint on each of two ranks, which are processes that share it over gloo."""
    folder = tmp_path_factory.mktemp("logits")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_rank, args=(rank, folder, folders)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(200)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.timeout(600)
@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one(name: str, folders: dict[str, Path], of_two_ranks: list[dict[str, torch.Tensor]]) -> None:
    """With dynamic 8-bit inputs, each rank scales its own part of a row-parallel layer's, so the rounding differs."""
    whole = logits_of(name, folders[name], 1)
    first, second = (each[name] for each in of_two_ranks)
    assert torch.equal(first, second)
    limit = {"int8": 0.06, HEAD: 0.06, "online int8": 0.06, "fp8": 0.2, "online fp8": 0.2}.get(name, 1e-5)
    assert float((first - whole).norm() / whole.norm()) < limit


@pytest.fixture
def fake_ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process is rank 0 of several, whose collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def refused(folder: Path, num_ranks: int) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(EngineConfig(str(folder), "float32", device="cpu", tensor_parallel_size=num_ranks))
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("fake_ranks", [4], indirect=True)
def test_sizes_that_do_not_fit_name_those_that_do(fake_ranks: int, tmp_path: Path) -> None:
    sizes = SIZES | {"num_key_value_heads": 4, "intermediate_size": 192}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "plain")
    folder = make_checkpoint(tmp_path / "plain", tmp_path / "int4", packed()).folder
    assert refused(folder, fake_ranks).endswith(
        "model.layers.0.mlp.down_proj, shared by 4 ranks: the 48 inputs of a rank are not a multiple of 32; "
        "--tensor-parallel-size may be 1 or 2"
    )
    sizes |= {"vocab_size": 322}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "odd")
    folder = make_checkpoint(tmp_path / "odd", tmp_path / "int8", w8a8("int", ignore=[]), ()).folder
    assert refused(folder, fake_ranks).endswith(
        "lm_head, shared by 4 ranks: its 322 outputs are not a multiple of 4; --tensor-parallel-size may be 1 or 2"
    )


@pytest.mark.parametrize("fake_ranks", [2], indirect=True)
def test_groups_out_of_order_against_the_config_are_refused(fake_ranks: int, plain: Path, tmp_path: Path) -> None:
    form = gptq(desc_act=True)
    form.config["desc_act"] = False
    assert refused(make_checkpoint(plain, tmp_path / "gptq", form).folder, fake_ranks).endswith(
        "o_proj: g_idx is out of order, although desc_act is false; use --tensor-parallel-size 1"
    )


@pytest.mark.parametrize("fake_ranks", [2], indirect=True)
def test_a_rank_has_half_of_each_layer(fake_ranks: int, folders: dict[str, Path]) -> None:
    tensors = load_file(folders[ONLINE[0]] / "model.safetensors")
    num_weights = sum(each.numel() for name, each in tensors.items() if name.endswith("proj.weight"))
    for name in FORMATS:
        loaded = load_model(EngineConfig(str(folders[name]), "float32", device="cpu", tensor_parallel_size=fake_ranks))
        layers = [module for module in loaded.model.modules() if isinstance(module, QuantizedLinear)]
        assert len(layers) == 14
        assert sum(layer.in_features * layer.out_features for layer in layers) == num_weights // 2
