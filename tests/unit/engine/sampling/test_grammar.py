"""Grammars in the engine: masks against the library's own validator, states rebuilt from tokens, and limits."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from msgspec.structs import replace

from tandem.engine.batch import ItemOutput, Sample
from tandem.engine.model_runner import with_outcomes
from tandem.engine.sampling.grammar import Grammar
from tandem.engine.sampling.grammar_mask import GrammarMasks, StepMask, compute_masks
from tandem.engine.sampling.grammar_messages import LoadTokenizer
from tandem.engine.sampling.grammar_process import GrammarMatcher, compile_grammar, make_tokenizer
from tandem.engine.sampling.grammars import Grammars, GrammarServer, read_tokenizer
from tandem.protocol.messages.grammar import MAX_GRAMMAR_BYTES, check_grammar
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, Thinking
from tandem.runtime.errors import InvalidRequest
from tests.support.garbage import frames_in, kept_garbage
from tests.support.sampling import sample
from tests.unit.engine.sampling.small_grammars import (
    BPE,
    END,
    OTHER_END,
    TOKENIZER,
    VOCAB_SIZE,
    allowed,
    done,
    grammar_of,
    matcher_of,
    state_of,
)

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 300},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "long tag"]}, "maxItems": 3},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMARS = [
    f"%llguidance {{}}\nstart: %json {json.dumps(SCHEMA)}",
    "start: /[a-c]{2,5}x?(é|日本)*/",
    'start: greeting " " ("world" | "you")\ngreeting: "hello"i | "good " DAY\nDAY: "day" | "night"',
]


@pytest.fixture(scope="module")
def server() -> Iterator[GrammarServer]:
    server = GrammarServer(LoadTokenizer(BPE.to_str().encode(), VOCAB_SIZE, END))
    yield server
    server.close()


def by_the_validator(text: str, output: list[int]) -> set[int]:
    """Returns the tokens that the library's validator accepts next, asked one by one."""
    matcher = LLMatcher(TOKENIZER, text)
    assert matcher.consume_tokens(output)
    tokens = {i for i in range(VOCAB_SIZE) if i > OTHER_END and matcher.validate_tokens([i]) == 1}
    return tokens | ({END, OTHER_END} if matcher.is_accepting() else set())


def walk(text: str, rng: random.Random, max_tokens: int = 60) -> list[list[int]]:
    """Yields every prefix of one random output that the grammar allows."""
    state, output = matcher_of(text), list[int]()
    prefixes = [[]] if not output else []
    for _ in range(max_tokens):
        tokens = sorted(allowed(state, output))
        token_id = rng.choice(tokens)
        if token_id in (END, OTHER_END):
            break
        output.append(token_id)
        prefixes.append(list(output))
    return prefixes


@pytest.mark.parametrize("text", GRAMMARS)
def test_the_mask_equals_the_validators_choices(text: str) -> None:
    """If the grammar allows only one text, the mask allows only its canonical token."""
    rng = random.Random(1)
    for _ in range(4):
        state = matcher_of(text)
        for output in walk(text, rng):
            tokens, valid = allowed(state, output), by_the_validator(text, output)
            if tokens != valid:
                matcher = LLMatcher(TOKENIZER, text)
                assert matcher.consume_tokens(output)
                assert tokens == {matcher.compute_ff_tokens()[0]} < valid


@pytest.mark.parametrize("text", GRAMMARS)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_a_rebuilt_state_equals_the_continued_one(text: str, seed: int) -> None:
    """Checks every position, also in steps of several tokens as after a preemption."""
    rng = random.Random(seed)
    going_on, jumping = matcher_of(text), matcher_of(text)
    for output in walk(text, rng):
        expected = allowed(going_on, output)
        assert allowed(matcher_of(text), output) == expected
        if rng.random() < 0.3:
            assert allowed(jumping, output) == expected
            assert allowed(jumping, output) == expected  # asking changes nothing


def test_end_tokens_are_allowed_only_where_the_grammar_may_end() -> None:
    text = 'start: "ab" "c"?'
    a, b, c = (BPE.encode(letter).ids[0] for letter in "abc")
    assert {END, OTHER_END}.isdisjoint(allowed(matcher_of(text), [a]))
    assert allowed(matcher_of(text), [a, b]) == {c, END, OTHER_END}
    assert allowed(matcher_of(text, frozenset({OTHER_END})), [a, b]) == {c, OTHER_END}
    # min_tokens delays the end only while another token is allowed
    ends = frozenset({END, OTHER_END})
    assert allowed(matcher_of(text), [a, b], banned=ends) == {c}
    assert allowed(matcher_of(text), [a, b, c], banned=ends) == ends
    with pytest.raises(InvalidRequest, match="no token"):
        allowed(matcher_of(text, frozenset()), [a, b, c])


def test_tokens_outside_the_grammar_are_an_error() -> None:
    state = matcher_of('start: "ab"')
    with pytest.raises(InvalidRequest, match="cannot be followed"):
        allowed(state, BPE.encode("b").ids)


ROWS = [
    SamplingParams(temperature=0.0, grammar="x"),
    SamplingParams(temperature=1.0, grammar="x"),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=200, grammar="x"),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, grammar="x"),
    SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.5, presence_penalty=1.0, grammar="x"),
    SamplingParams(temperature=2.0, logit_bias=((70, 100.0),), grammar="x", logprobs=2),
]


@given(seed=st.integers(0, 2**32))
@settings(max_examples=8)
def test_sampled_text_matches_the_grammar_with_any_sampling_fields(server: GrammarServer, seed: int) -> None:
    """The masks come from `GrammarMasks`, rows with and without a grammar in one batch, over random logits."""
    rng = random.Random(seed)
    torch.manual_seed(seed % 2**31)
    masks = GrammarMasks()
    texts = [rng.choice(GRAMMARS) for _ in ROWS]
    states = [None if p.grammar is None else state_of(server, text) for p, text in zip(ROWS, texts, strict=True)]
    outputs: list[list[int]] = [[] for _ in ROWS]
    ended: set[int] = set()
    for position in range(40):
        live = [i for i in range(len(ROWS)) if i not in ended]
        banned = {END, OTHER_END} if position < 5 else ()
        samples = [
            Sample(ROWS[i], output_token_ids=outputs[i], banned_token_ids=banned, grammar=states[i]) for i in live
        ]
        masking = masks.start(samples, True)
        mask = masking.result() if masking is not None else None
        logits = torch.randn(len(live), VOCAB_SIZE) * 3
        chosen = sample(logits, samples, [position] * len(live), mask)
        late = {live[number] for number in mask.late} if mask is not None else set()
        for i, row, token in zip(live, logits, chosen, strict=True):
            if i in late:
                continue
            if states[i] is None:
                assert banned or token.token_id == int(row.argmax())
                continue
            assert token.token_id in by_the_validator(texts[i], outputs[i])
            if token.logprobs is not None:  # the model's own
                assert token.logprobs.logprob == pytest.approx(float(row.log_softmax(-1)[token.token_id]), abs=1e-4)
            if token.token_id in (END, OTHER_END):
                ended.add(i)
        for i, token in zip(live, chosen, strict=True):
            if i not in late:
                outputs[i].append(token.token_id)


def test_a_batch_without_grammars_starts_no_thread() -> None:
    assert GrammarMasks().start([Sample(SamplingParams())], True) is None


def test_sequences_that_begin_together_share_a_mask(server: GrammarServer) -> None:
    state = state_of(server, 'start: "ab"')
    samples = [
        Sample(SamplingParams(), grammar=state),
        Sample(SamplingParams()),
        Sample(SamplingParams(), grammar=state),
    ]
    mask = compute_masks(samples, [0, 2])
    assert (mask.rows, mask.mask_rows, len(mask.bits)) == ([0, 2], [0, 0], 1)


def test_a_failing_grammar_does_not_affect_other_sequences(server: GrammarServer) -> None:
    broken = Grammar(done(InvalidRequest("the grammar cannot be served: x"))).new_state({END})
    lost, fine = (state_of(server, 'start: "ab"') for _ in range(2))
    samples = [
        Sample(SamplingParams(), output_token_ids=output, grammar=state)
        for state, output in ((broken, []), (lost, BPE.encode("b").ids), (fine, BPE.encode("a").ids))
    ]
    mask = compute_masks(samples, [0, 1, 2])
    assert set(mask.errors) == {0, 1} and mask.rows == [2]
    logits = torch.zeros(3, VOCAB_SIZE)
    mask.apply(logits)
    assert logits[:2].eq(0).all()
    assert set(torch.isfinite(logits[2]).nonzero()[:, 0].tolist()) == set(BPE.encode("b").ids)
    outputs = [
        ItemOutput([SampledToken(1)]),
        ItemOutput([]),
        ItemOutput([SampledToken(1)]),
        ItemOutput([SampledToken(1)]),
    ]
    with kept_garbage() as garbage:
        compute_masks(samples[:2], [0, 1])
    assert not frames_in("engine/sampling/", garbage)
    alone = compute_masks(samples[:1], [0])
    alone.apply(logits)
    assert set(alone.errors) == {0} and logits[:2].eq(0).all()
    checked = with_outcomes(outputs, mask)
    assert [output.error is not None for output in checked] == [True, False, True, False]


def test_a_sequence_goes_on_without_an_optional_grammar_that_fails(
    server: GrammarServer, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Grammar(done(InvalidRequest("the grammar\x1b cannot be served: x")))
    states = [broken.new_state({END}, is_optional=True), broken.new_state({END}, is_optional=True)]
    followed = grammar_of(server, 'start: "ab"')
    states += [followed.new_state({END}, is_optional=True) for _ in range(2)]
    outputs = [[], [], BPE.encode("b").ids, BPE.encode("a").ids]
    for _ in range(2):  # each step, and once in the log
        samples = [
            Sample(SamplingParams(), output_token_ids=output, grammar=state, banned_token_ids={END, VOCAB_SIZE + 5})
            for state, output in zip(states, outputs, strict=True)
        ]
        mask = compute_masks(samples, [0, 1, 2, 3])
        assert mask.errors == {} and mask.rows == [3], "the last one is followed"
        logits = torch.zeros(4, VOCAB_SIZE)
        mask.apply(logits)
        for row in range(3):
            assert set(torch.isinf(logits[row]).nonzero()[:, 0].tolist()) == {END}, "before min_tokens"
        assert set(torch.isfinite(logits[3]).nonzero()[:, 0].tolist()) == set(BPE.encode("b").ids)
    messages = [each for each in caplog.messages if "go on without their grammar" in each]
    assert len(messages) == 2 and all(each.isprintable() for each in messages)


def test_a_failed_compilation_keeps_no_reference_to_its_sequences() -> None:
    wrong = InvalidRequest("the grammar cannot be served: x")
    grammar = Grammar(done(wrong))
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="cannot be served: x"):
            grammar.process()
    assert wrong.__traceback__ is None


def test_logits_beyond_the_tokenizer_are_not_allowed() -> None:
    logits = torch.zeros(2, 50)
    StepMask([1], [0], np.array([[0b101, 0, 0, 0x80]], np.uint8), {}).apply(logits)
    assert logits[0].eq(0).all()
    assert torch.isfinite(logits[1]).nonzero()[:, 0].tolist() == [0, 2, 31]


def test_compiled_grammars_are_cached(noise_model: Any) -> None:
    compiled: list[None] = []
    grammars = Grammars(str(noise_model), 2048, lambda: compiled.append(None))
    try:
        assert grammars.get(None) is None
        first, broken = grammars.get('start: "a"'), grammars.get("start: nothing")
        assert first is not None and broken is not None
        first.process()
        with pytest.raises(InvalidRequest, match="unknown name"):
            broken.process()
        assert grammars.get('start: "a"') is first and first.is_compiled and broken.is_compiled
        first.has_ended = True
        again = grammars.get('start: "a"')
        assert again is not first, "it is not compiled in a step"
        assert again is not None and again is grammars.get('start: "a"')
        first = again
        for number in range(70):
            grammars.get(f'start: "{number}"')
        assert grammars.get('start: "a"') is not first
    finally:
        grammars.close()


def test_a_model_without_a_usable_tokenizer_refuses_grammars(tmp_path: Any) -> None:
    with pytest.raises(InvalidRequest, match="its tokeniser cannot be used"):
        read_tokenizer(str(tmp_path), 100)
    with pytest.raises(InvalidRequest, match="has no eos_token"):
        make_tokenizer(BPE.to_str(), VOCAB_SIZE, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("start: " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply nested"),
        ("start: /" + "(" * 3000 + "a" + ")" * 3000 + "/", "invalid regex"),
        ("start: " + '"a" ' * MAX_GRAMMAR_BYTES, "too large"),
        ("start: %json " + '{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
        ("start: /(?=a)b/", "look-around"),
        ("start: nothing", 'unknown name: "nothing"'),
        ("", "Empty grammar"),
        ('start: %json {"type": "foo"}', "Invalid type: foo"),
    ],
)
def test_unsupported_grammars_are_refused_with_one_line(text: str, says: str) -> None:
    error = check_grammar(text).error
    assert says in error and "\n" not in error and len(error) < 500


def test_hostile_grammars_stay_within_limits() -> None:
    """Each is refused, or compiles and gives a mask or an error; the process survives."""
    hostile = [
        "start: /((a{1,1000}){1,1000}){1,1000}/",
        'start: (("a"~1..1000)~1..1000)~1..1000',
        "start: /" + "|".join(f".*a.{{{i}}}b" for i in range(100)) + "/",
        "start: a a\na: a a | b\nb: /x*/ a | /x*y*/",
        f"start: %json {json.dumps({'enum': [f'value {i}' for i in range(5000)]})}",
    ]
    for text in hostile:
        try:
            assert "\n" not in check_grammar(text).error
            allowed(matcher_of(text), [])
        except InvalidRequest as error:
            assert "\n" not in error.message


def test_the_demo_vocabulary_can_spell_json(noise_model: Any) -> None:
    read = read_tokenizer(str(noise_model), 2048)
    tokenizer: LLTokenizer = make_tokenizer(read.tokenizer_json.decode(), read.vocab_size, read.eos_token_id)
    matcher = compile_grammar(tokenizer, GRAMMARS[0])
    text = '{"name": "né日", "size": 7}'
    assert matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


@given(seed=st.integers(0, 2**31), num_allowed=st.sampled_from([1, 2, 7, 300]), scale=st.sampled_from([0.1, 5.0, 60.0]))
@settings(max_examples=10)
def test_only_allowed_tokens_are_sampled_from_a_large_vocabulary(seed: int, num_allowed: int, scale: float) -> None:
    """Most tokens may be impossible in the segments or candidates that the sampler looks at."""
    torch.manual_seed(seed)
    vocab_size = 5000
    params = [replace(p, temperature=t, seed=seed + i) for i, p in enumerate(ROWS[:6]) for t in (0.0, 1.0)]
    allowed_ids = torch.randperm(vocab_size)[:num_allowed]
    is_allowed = np.zeros(8 * 632, dtype=np.uint8)
    is_allowed[allowed_ids.numpy()] = 1
    bits = np.packbits(is_allowed, bitorder="little")[None]
    mask = StepMask(list(range(len(params))), [0] * len(params), bits, {})
    samples = [Sample(p, output_token_ids=[1, 2]) for p in params]
    logits = torch.randn(len(params), vocab_size) * scale
    logits[:, allowed_ids] -= 3 * scale
    chosen = sample(logits, samples, list(range(len(params))), mask)
    assert {token.token_id for token in chosen} <= set(allowed_ids.tolist())


# ---- thinking before the answer


THINK, END_THINK = 17, 18
VOCABULARY = set(range(VOCAB_SIZE))


def test_a_grammar_applies_after_the_thinking() -> None:
    thinking = Thinking(True, (THINK,), (END_THINK,), (END_THINK,))
    answer = BPE.encode("yes").ids
    state, output = yes_of(thinking), BPE.encode("Hm, no.").ids
    for number in range(len(output) + 1):  # thinking is free, but cannot end the sequence
        assert allowed(state, output[:number]) & VOCABULARY == VOCABULARY - {END}
    output.append(END_THINK)
    for token_id in answer:
        assert allowed(state, output) == allowed(yes_of(), output[output.index(END_THINK) + 1 :])
        assert token_id in allowed(state, output)
        output.append(token_id)
    assert allowed(state, output) == {END}
    resumed = yes_of(thinking)  # as after a migration: the state is a function of the tokens
    assert allowed(resumed, output) == {END}


def test_a_sequence_may_begin_to_think_or_to_answer() -> None:
    thinking = Thinking(False, (THINK,), (END_THINK,), (END_THINK,))
    first = allowed(yes_of(), [])
    answer = BPE.encode("yes").ids
    state = yes_of(thinking)
    assert allowed(state, []) == first | {THINK}
    assert allowed(state, [THINK]) & VOCABULARY == VOCABULARY - {END}
    assert allowed(state, [THINK, 40, END_THINK]) == first
    other = yes_of(thinking)
    assert allowed(other, []) == first | {THINK}
    assert allowed(other, answer) == {END}


def test_an_opening_of_several_tokens_may_share_its_beginning_with_the_answer() -> None:
    yes = BPE.encode("yes").ids
    thinking = Thinking(False, (yes[0], THINK), (END_THINK,), (END_THINK,))
    state = yes_of(thinking)
    assert yes[0] in allowed(state, [])
    assert allowed(state, yes[:1]) == allowed(yes_of(), yes[:1]) | {THINK}
    assert allowed(state, yes) == {END}
    thinks = yes_of(thinking)
    allowed(thinks, yes[:1])
    assert allowed(thinks, [yes[0], THINK]) & VOCABULARY == VOCABULARY - {END}
    assert allowed(thinks, [yes[0], THINK, END_THINK]) == allowed(yes_of(), [])


@pytest.mark.parametrize("vocab_size", [320, 333, 351, 352, 353])
def test_all_masks_have_one_size(vocab_size: int) -> None:
    """A step joins those of sequences that think, that may begin to, and that answer."""
    tokenizer = make_tokenizer(BPE.to_str(), vocab_size, END)
    thinking = Thinking(True, (THINK,), (END_THINK,), (END_THINK,))
    matchers = [
        GrammarMatcher(compile_grammar(tokenizer, 'start: "yes"'), tokenizer, {END}, each)
        for each in (thinking, replace(thinking, is_open=False), None)
    ]
    assert {len(matcher.mask([], ())) for matcher in matchers} == {4 * -(-vocab_size // 32)}


def yes_of(thinking: Thinking | None = None) -> GrammarMatcher:
    return matcher_of('%llguidance {}\nstart: "yes"', frozenset({END}), thinking)
