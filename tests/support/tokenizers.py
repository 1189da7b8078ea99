"""A small tokeniser of each family: they differ in how tokens become text."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = "</s>"
_WORDS = ["the quick brown fox jumps over the lazy dog", "true or false, naïve café", "日本語 😀 🎉"] * 4


def token_id(tokenizer: Tokenizer, piece: str) -> int:
    found = tokenizer.token_to_id(piece)
    assert found is not None, piece
    return found


@cache
def byte_level() -> Tokenizer:
    """Returns a tokeniser like GPT-2's, Llama 3's and Qwen's: its vocabulary is of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL],
    )
    tokenizer.train_from_iterator(_WORDS, trainer)
    return tokenizer


def _sentencepiece_vocab() -> dict[str, int]:
    vocab = {"<unk>": 0, SPECIAL: 1} | {f"<0x{i:02X}>": 2 + i for i in range(256)}
    for word in ("▁", "▁▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "true", "▁true", ".", "é", "▁日"):
        vocab[word] = len(vocab)
    return vocab


@cache
def sentencepiece_bpe() -> Tokenizer:
    """Returns a tokeniser like Llama 2's: words begin with a mark, and unknown characters become bytes."""
    vocab = _sentencepiece_vocab()
    tokenizer = Tokenizer(
        models.BPE(vocab, [("▁", "a"), ("▁", "b"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


@cache
def sentencepiece_without_strip() -> Tokenizer:
    """Returns a tokeniser like Gemma's, which keeps the blank of a first word."""
    tokenizer = Tokenizer(models.BPE(_sentencepiece_vocab(), [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


@cache
def unigram() -> Tokenizer:
    """Returns a tokeniser like T5's and XLM-R's."""
    vocab = [(piece, -float(i)) for piece, i in _sentencepiece_vocab().items() if not piece.startswith("<0x")]
    tokenizer = Tokenizer(models.Unigram(vocab, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """Returns a tokeniser like BERT's: the parts of a word but its first have a mark."""
    pieces = ["[UNK]", "[unused0]", "a", "b", "the", ".", ",", "##a", "##ing", "##é", "n't", "日"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


@cache
def word_ends() -> Tokenizer:
    """Returns a tokeniser like that of CLIP's and GPT-1's: the last part of a word has a mark."""
    pieces = ["<unk>", "a", "b</w>", "b", "the</w>", "é", ".</w>"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return tokenizer


FAMILIES = (byte_level, sentencepiece_bpe, sentencepiece_without_strip, unigram, word_piece, word_ends)
