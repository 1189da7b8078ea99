"""Trains the demo model: `python -m tools.demo_model.train [FOLDER]`. Reproducible for the same seed and machine.

Rows are chats of several turns; the loss covers the assistant's tokens. Matrices are trained with Muon (Jordan et al.,
2024), the rest with AdamW. Weights are float32; products are bfloat16 on CPUs with AMX and float32 on others, where
bfloat16 is slower.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tandem.deploy.demo_model import DEMO_MODEL
from tandem.runtime.cores import num_cores
from tandem.runtime.errors import ConfigError
from tools.demo_model.chats import Chat, Stage, all_small_talk, training_chat
from tools.demo_model.lessons import HARD_LESSONS, LESSONS, SHORT_COUNTS
from tools.demo_model.memory import KINDS
from tools.demo_model.tokenizer import MAX_MODEL_LEN, VOCAB_SIZE, ChatEncoder, save_tokenizer, train_tokenizer

SEED = 1
NUM_STEPS = 5000
STAGES = {
    0: Stage(LESSONS),
    1600: Stage(LESSONS | SHORT_COUNTS),
    3700: Stage(HARD_LESSONS | SHORT_COUNTS, 0.7, 0.55, (*KINDS, *5 * ("on",), *2 * ("after", "before"))),
}
"""Stages by their first step; the last one repeats what the model still got wrong."""
LEVEL_SHARE = 0.1
"""Share of the steps before the learning rate starts to fall linearly to zero."""
TOKENS_PER_STEP = 4096
ROW_LENGTHS = (128, 128, 256, 256, 512, 1024, 2048)
"""Row lengths in tokens, used in turn."""
MUON_LR, ADAM_LR = 0.012, 0.004
WARM_UP_STEPS = 60
SAVE_EVERY = 100
_IGNORED = -100
_PLAIN_ATTENTION = 256
_HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_bf16", False))


def make_model() -> LlamaForCausalLM:
    """Returns a model with 3.7 million random parameters (7.5 MB in bfloat16)."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def batch(encoder: ChatEncoder, step: int) -> tuple[Tensor, Tensor]:
    """Returns token ids and labels of one step, each [num_rows, row_length]."""
    length = ROW_LENGTHS[step % len(ROW_LENGTHS)]
    ids = torch.zeros(TOKENS_PER_STEP // length, length, dtype=torch.long)
    labels = torch.full_like(ids, _IGNORED)
    for row, chat in zip(range(len(ids)), _chats(step, length), strict=False):
        row_ids, is_answer = encoder.encode(chat, length)
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        labels[row, : len(row_ids)] = torch.where(torch.tensor(is_answer), ids[row, : len(row_ids)], _IGNORED)
    return ids, labels


def _chats(step: int, length: int) -> Iterator[Chat]:
    rng = Random(f"{SEED} step {step}")
    small_talk_chats = list(all_small_talk())
    stage = STAGES[max(first for first in STAGES if first <= step)]
    while True:
        if length <= 128 and rng.random() < 0.06:  # small talk as the first turn, as most users send it
            yield rng.choice(small_talk_chats)
        else:
            keeps_list = length >= 256 and rng.random() < stage.keeps_list_share
            yield training_chat(rng, length // 8, stage, keeps_list=keeps_list)  # an upper limit on the turns that fit


def mean_loss(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean loss over labelled tokens; computes logits only for these."""
    # In bfloat16 the backward pass of the fused kernel is three times slower for short rows.
    model.set_attn_implementation("eager" if _HAS_AMX and ids.shape[1] <= _PLAIN_ATTENTION else "sdpa")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_HAS_AMX):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        is_label = labels[:, 1:] != _IGNORED
        logits = model.lm_head(hidden[is_label])
    return F.cross_entropy(logits.float(), labels[:, 1:][is_label])


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.01, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(step: int) -> float:
    """Returns the learning rate of a step relative to the peak: linear warm-up, plateau, linear decay to zero."""
    cooling = (NUM_STEPS - step) / ((1 - LEVEL_SHARE) * NUM_STEPS)
    return min(1.0, (step + 1) / WARM_UP_STEPS, cooling)


def train(folder: Path, checkpoint: Path) -> list[float]:
    """Trains, resuming from `checkpoint` if it exists. Returns the loss of each step."""
    bpe = train_tokenizer(SEED)
    encoder = ChatEncoder(bpe)
    model = make_model()
    optimizers = make_optimizers(model)
    losses: list[float] = []
    if checkpoint.exists():
        kept: dict[str, Any] = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(kept["model"])
        for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        losses = kept["losses"]
    largest = [group["lr"] for optimizer in make_optimizers(model) for group in optimizer.param_groups]
    columns = ("Training", BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), speed_estimate_period=300) as progress:
        task = progress.add_task("", total=NUM_STEPS, completed=len(losses), loss=losses[-1] if losses else 0.0)
        for step in range(len(losses), NUM_STEPS):
            ids, labels = batch(encoder, step)
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            for group, lr in zip(groups, largest, strict=True):
                group["lr"] = lr * learning_rate(step)
            loss = mean_loss(model, ids, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            progress.update(task, advance=1, loss=sum(losses[-20:]) / len(losses[-20:]))
            if len(losses) % SAVE_EVERY == 0:
                states = [optimizer.state_dict() for optimizer in optimizers]
                scratch = checkpoint.with_suffix(".new")
                torch.save({"model": model.state_dict(), "optimizers": states, "losses": losses}, scratch)
                scratch.replace(checkpoint)
    save(model, folder)
    save_tokenizer(bpe, folder)
    return losses


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Writes config and weights (bfloat16, safetensors)."""
    folder.mkdir(parents=True, exist_ok=True)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=0, pad_token_id=0, do_sample=True, temperature=0.5, top_p=0.9
    )
    model.save_pretrained(folder)


_SMOOTHED_OVER = 50  # steps


def check_plotting() -> None:
    """Raises ConfigError without matplotlib, so that a training does not fail at its end."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the loss plot needs matplotlib: pip install matplotlib") from error


def plot_losses(losses: list[float], file: Path) -> None:
    """Plots the loss of each step in grey and its running mean. `file`: .svg or .png."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"  # makes the file reproducible
    import matplotlib.pyplot as plt

    smooth = [_mean(losses[max(0, i - _SMOOTHED_OVER) : i + _SMOOTHED_OVER]) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(losses, color="0.8", linewidth=0.5)
    axes.plot(smooth, color="tab:blue")
    axes.set(yscale="log", xlabel="step", ylabel="loss per answered token", title="Training of the demo model")
    axes.grid(which="both", alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.train", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--plot", type=Path, default=Path("docs/demo_model_loss.svg"), help="file for the loss plot")
    parser.add_argument("--threads", type=int, default=num_cores())
    options = parser.parse_args(arguments)
    check_plotting()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    losses = train(options.folder, options.folder.with_suffix(".checkpoint"))
    plot_losses(losses, options.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
