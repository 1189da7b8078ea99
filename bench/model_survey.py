"""Which of transformers' decoder families Tandem serves: each is built tiny with random weights, loaded and compared.

    python -m bench.model_survey                       # all families, as a Markdown table
    python -m bench.model_survey llama gemma3_text     # some
    python -m bench.model_survey --write docs/models.md

A family is served when, with its tokens cut up into odd chunks and mixed with another sequence's, the engine's
log-probabilities are those of transformers' own eager forward, and its greedy tokens those of `generate`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from bench.tiny_models import NotBuiltError, make_tiny_config, randomize
from tandem.engine.batch import BatchItem
from tandem.engine.config import EngineConfig
from tandem.engine.cpu.attention import CPUAttention
from tandem.engine.kv_pool import KVPool
from tandem.engine.loading.model_loader import load_model
from tandem.engine.model_runner import ModelRunner
from tandem.runtime.errors import ConfigError

SERVED, REFUSED, WRONG, UNKNOWN = "served", "refused", "WRONG", "not compared"
TOLERANCE = 1e-3  # of log-probabilities, float32
LIMIT_S = 60.0
NUM_PROCESSES = 2
BEGIN, END = "<!-- survey: begin -->\n", "<!-- survey: end -->\n"


@dataclass(frozen=True)
class Verdict:
    """One family's. detail: largest difference, reason of the refusal, or what went wrong."""

    family: str
    verdict: str
    detail: str


def survey(family: str, folder: Path) -> Verdict:
    """Build, load and compare one family in this process."""
    torch.manual_seed(0)
    try:
        config = make_tiny_config(family)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        randomize(made)
        made.save_pretrained(folder)
    except NotBuiltError as error:
        return Verdict(family, UNKNOWN, str(error))
    except Exception as error:
        return Verdict(family, UNKNOWN, f"cannot be built tiny: {_first_line(error)}")
    engine = EngineConfig(
        str(folder), dtype="float32", device="cpu", block_size=8, kv_cache_bytes=1 << 27, max_model_len=256
    )
    refusal = None
    try:
        loaded = load_model(engine)
    except ConfigError as error:
        refusal = str(error).partition("cannot be served: ")[2] or str(error)
    if refusal is not None:
        return Verdict(family, REFUSED, refusal)
    try:
        reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        sequences = _generated(reference)
        with torch.inference_mode():
            expected = [
                reference(input_ids=torch.tensor([s]), use_cache=False).logits[0].log_softmax(-1) for s in sequences
            ]
    except Exception as error:
        return Verdict(family, UNKNOWN, f"transformers itself fails: {_first_line(error)}")
    try:
        pool = KVPool(loaded, engine)
        ModelRunner(loaded, pool)  # fuses and packs layers, which must be compared too
        got = _in_odd_chunks(loaded, pool, sequences)
    except Exception as error:
        return Verdict(family, WRONG, f"fails while running: {_first_line(error)}")
    difference = max(float((g - e).abs().max()) for g, e in zip(got, expected, strict=True))
    if not difference <= TOLERANCE:
        return Verdict(family, WRONG, f"log-probabilities differ by {difference:.2g}")
    for sequence, logprobs, num_prompt in zip(sequences, got, NUM_PROMPT_TOKENS, strict=True):
        if logprobs[num_prompt - 1 : -1].argmax(-1).tolist() != sequence[num_prompt:]:
            return Verdict(family, WRONG, "greedy tokens differ from those of generate")
    layout = loaded.layout
    return Verdict(
        family, SERVED, f"{difference:.1e}; {layout.num_layers} x {layout.num_kv_heads} heads of {layout.head_dim}"
    )


NUM_PROMPT_TOKENS = (43, 21)
NUM_NEW_TOKENS = 12


def _generated(model: Any) -> list[list[int]]:
    rng = random.Random(0)
    sequences = []
    for num_tokens in NUM_PROMPT_TOKENS:
        prompt = torch.tensor([[rng.randrange(3, 300) for _ in range(num_tokens)]])
        mask = torch.ones_like(prompt)
        ids = model.generate(
            prompt, attention_mask=mask, max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS,
            do_sample=False, num_beams=1, suppress_tokens=None, repetition_penalty=1.0, pad_token_id=0, eos_token_id=-1,
        )  # fmt: skip
        sequences.append(ids[0].tolist())
    return sequences


@torch.inference_mode()
def _in_odd_chunks(loaded: Any, pool: KVPool, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities after each token: [num_tokens, vocab_size] per sequence."""
    rng = random.Random(1)
    block_size = pool.layout.block_size
    ids = rng.sample(range(pool.num_blocks), 64)
    tables = [[ids.pop() for _ in range(-(-len(s) // block_size))] for s in sequences]
    done = [0] * len(sequences)
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        items, owners = [], []
        for i, sequence in enumerate(sequences):
            chunk = sequence[done[i] : done[i] + rng.choice([1, 1, 3, 7, 20])]
            if chunk and rng.random() < 0.8:
                items.append(BatchItem(chunk, done[i], tables[i]))
                owners.append(i)
        if not items:
            continue
        tokens = [token for item in items for token in item.token_ids]
        positions = [item.start + j for item in items for j in range(len(item.token_ids))]
        logits = loaded.model(
            input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False,
            logits_to_keep=torch.arange(len(tokens)), tandem=CPUAttention(pool, items),
        ).logits[0]  # fmt: skip
        for i, item, part in zip(owners, items, logits.split([len(item.token_ids) for item in items]), strict=True):
            done[i] += len(item.token_ids)
            rows[i].append(part.log_softmax(-1))
    return [torch.cat(parts) for parts in rows]


def _first_line(error: BaseException) -> str:
    text = " ".join((str(error).strip().splitlines() or [""])[0].split())
    return f"{type(error).__name__}: {text}"[:160]


def families() -> list[str]:
    """Model types whose own config, not a part's or another's, has a causal language model."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING]


@dataclass
class _Child:
    family: str
    pid: int
    pipe: int
    deadline: float


def run_all(names: list[str]) -> list[Verdict]:
    """Each family in a forked process of its own, some at a time, each with a time limit."""
    waiting, running, verdicts = list(names), list[_Child](), dict[str, Verdict]()
    while waiting or running:
        while waiting and len(running) < NUM_PROCESSES:
            running.append(_fork(waiting.pop(0)))
        ready, _, _ = select.select([child.pipe for child in running], [], [], 1.0)
        for child in list(running):
            if child.pipe in ready:
                text = b"".join(iter(partial(os.read, child.pipe, 1 << 16), b"")).decode()
                verdict = Verdict(**json.loads(text)) if text else Verdict(child.family, UNKNOWN, "its process died")
            elif time.monotonic() > child.deadline:
                os.kill(child.pid, signal.SIGKILL)
                verdict = Verdict(child.family, UNKNOWN, f"took more than {LIMIT_S:.0f} s")
            else:
                continue
            os.close(child.pipe)
            os.waitpid(child.pid, 0)
            running.remove(child)
            verdicts[child.family] = verdict
            print(f"{verdict.family}: {verdict.verdict}, {verdict.detail}", file=sys.stderr, flush=True)
    return [verdicts[name] for name in names]


def _fork(family: str) -> _Child:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(family, pid, reader, time.monotonic() + LIMIT_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            verdict = survey(family, Path(folder))
        except BaseException as error:
            verdict = Verdict(family, UNKNOWN, f"the survey itself fails: {_first_line(error)}")
    os.write(writer, json.dumps(verdict.__dict__).encode())
    os._exit(0)


def as_table(verdicts: list[Verdict]) -> str:
    """Markdown, the served first."""
    order = [WRONG, SERVED, REFUSED, UNKNOWN]
    lines = ["| family | verdict | |", "| --- | --- | --- |"]
    for verdict in sorted(verdicts, key=lambda v: (order.index(v.verdict), v.family)):
        lines.append(f"| {verdict.family} | {verdict.verdict} | {verdict.detail.replace('|', ' ')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", type=Path, help="replace the table in this page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    verdicts = run_all(arguments.families or families())
    table = as_table(verdicts)
    if arguments.write is None:
        print(table)
    else:
        before, _, rest = arguments.write.read_text().partition(BEGIN)
        arguments.write.write_text(before + BEGIN + table + END + rest.partition(END)[2])
    sys.exit(any(verdict.verdict == WRONG for verdict in verdicts))


if __name__ == "__main__":
    main()
