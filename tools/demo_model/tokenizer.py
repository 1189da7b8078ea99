"""The demo model's tokeniser, a byte-level BPE with single digits trained on the lessons, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.chats import Chat, Stage, all_small_talk, training_chat
from tools.demo_model.lessons import LESSONS

VOCAB_SIZE = 2048
MAX_MODEL_LEN = 2048
END = "<|end|>"
SPECIAL_TOKENS = [END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>Functions, to be called by their names in <tool_call>:"
    "{% for tool in tools %}\n{{ tool['function'] | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>"
    "{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_NUM_CHATS, _NUM_TURNS = 2000, 64


def train_tokenizer(seed: int) -> Tokenizer:
    """Trains a tokeniser; the same seed gives the same one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[0-9]"), "isolated"),  # single digits; the first keeps its space
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(seed), trainer)
    return bpe


def _texts(seed: int) -> Iterator[str]:
    for chat in [
        *all_small_talk(),
        *(training_chat(Random(f"{seed} tokenizer {i}"), _NUM_TURNS, Stage(LESSONS)) for i in range(_NUM_CHATS)),
    ]:
        yield chat.system or ""
        for turn in chat.turns:
            yield turn.question
            yield turn.answer


def save_tokenizer(bpe: Tokenizer, folder: Path) -> None:
    bpe.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": MAX_MODEL_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class ChatEncoder:
    """Encodes chats as the chat template does, and marks the tokens that count towards the loss."""

    def __init__(self, bpe: Tokenizer) -> None:
        self.tokenizer = bpe
        self._end, self._system, self._user, self._assistant = range(
            len(SPECIAL_TOKENS)
        )  # special tokens have the first ids
        assert [bpe.id_to_token(i) for i in range(len(SPECIAL_TOKENS))] == SPECIAL_TOKENS

    def encode(self, chat: Chat, length: int) -> tuple[list[int], list[bool]]:
        """Returns the first `length` token ids at most, and whether each belongs to the assistant."""
        ids: list[int] = []
        is_answer: list[bool] = []
        if chat.system is not None:
            ids += (self._system, *self._encode(chat.system), self._end)
            is_answer += [False] * len(ids)
        for turn in chat.turns:
            if len(ids) >= length:
                break
            asked = (self._user, *self._encode(turn.question), self._end, self._assistant)
            answered = (*self._encode(turn.answer), self._end)
            ids += asked + answered
            is_answer += [False] * len(asked) + [True] * len(answered)
        return ids[:length], is_answer[:length]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids
