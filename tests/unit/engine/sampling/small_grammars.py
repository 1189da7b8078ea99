"""A small tokeniser, and grammars over it with and without processes of their own."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.engine.sampling.grammar import Grammar, GrammarState
from tandem.engine.sampling.grammar_process import GrammarMatcher, compile_grammar, make_tokenizer
from tandem.engine.sampling.grammars import GrammarProcess, GrammarServer
from tandem.protocol.messages.sampling import Thinking

VOCAB_SIZE = 333  # not a multiple of 8 or 32
END, OTHER_END = 0, 1


def make_bpe() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        ['{"name": "abc", "size": 12, "tags": ["a", "long tag"]} hello world good day'] * 9, trainer
    )
    return bpe


BPE = make_bpe()
TOKENIZER = make_tokenizer(BPE.to_str(), VOCAB_SIZE, END)


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def matcher_of(
    text: str, stops: frozenset[int] = frozenset({END, OTHER_END}), thinking: Thinking | None = None
) -> GrammarMatcher:
    return GrammarMatcher(compile_grammar(TOKENIZER, text), TOKENIZER, stops, thinking)


def allowed(matcher: GrammarMatcher, output: list[int], banned: frozenset[int] = frozenset()) -> set[int]:
    mask = np.frombuffer(matcher.mask(output, banned), np.uint8)
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask, bitorder="little"))}


def grammar_of(server: GrammarServer, text: str) -> Grammar:
    process = GrammarProcess(server, text)
    process.start()
    return Grammar(done(process))


def state_of(server: GrammarServer, text: str) -> GrammarState:
    return grammar_of(server, text).new_state({END, OTHER_END})
