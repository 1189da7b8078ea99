"""The sampler equals a plain float64 reference, follows its distributions, and does not depend on the batch."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tandem.engine.sampling.sampler
from tandem.engine.batch import Sample
from tandem.engine.sampling import penalties
from tandem.engine.sampling.grammar_mask import StepMask
from tandem.engine.sampling.noise import arrival_times
from tandem.engine.sampling.sampler import SamplingStep, log_total, race_weights
from tandem.protocol.messages.sampling import SampledToken, SamplingParams, Thinking
from tests.support.sampling import noise_keys, sample

VOCAB_SIZE = 50


def adjusted(logits: np.ndarray, wanted: Sample) -> np.ndarray:
    """Applies bans, allowed tokens, bias and penalties to one row by their definitions."""
    params, out = wanted.params, logits.astype(np.float64)
    for token_id, bias in params.logit_bias:
        out[token_id] += bias
    for token_id in wanted.banned_token_ids:
        out[token_id] = -math.inf
    for *before, last in params.bad_words:
        if tuple(wanted.output_token_ids)[len(wanted.output_token_ids) - len(before) :] == tuple(before):
            out[last] = -math.inf
    if params.allowed_token_ids:
        out[[i for i in range(len(out)) if i not in params.allowed_token_ids]] = -math.inf
    counts = Counter(wanted.output_token_ids)
    for token_id in {*wanted.prompt_token_ids, *wanted.output_token_ids}:
        penalty = params.repetition_penalty
        out[token_id] = out[token_id] / penalty if out[token_id] > 0 else out[token_id] * penalty
    for token_id, count in counts.items():
        out[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return out


def is_filtered(params: SamplingParams) -> bool:
    return bool(params.top_k or params.top_p < 1 or params.min_p)


def distribution(logits: np.ndarray, wanted: Sample) -> dict[int, float]:
    """Returns the expected probability of each token."""
    params = wanted.params
    scaled = adjusted(logits, wanted) / params.temperature
    order = list(range(len(scaled)))
    if is_filtered(params):
        order.sort(key=lambda i: (-scaled[i], i))
    weights = np.exp(scaled - scaled.max())
    probs = {i: float(weights[i] / weights.sum()) for i in order}
    most = max(probs.values())
    probs = {i: p for i, p in probs.items() if p >= params.min_p * most}
    if params.top_k:
        probs = dict(list(probs.items())[: params.top_k])
    total = sum(probs.values())
    probs = {i: p / total for i, p in probs.items()}
    if params.top_p < 1:
        kept, mass = {}, 0.0
        for i, p in probs.items():
            if mass >= params.top_p:
                break
            kept[i] = p
            mass += p
        probs = kept
    total = sum(probs.values())
    return {i: p / total for i, p in probs.items()}


def reference(logits: np.ndarray, wanted: Sample, position: int) -> tuple[int, float]:
    """Returns the choice for one row in float64, and the margin by which it wins."""
    params = wanted.params
    if params.temperature == 0:
        row = adjusted(logits, wanted)
        first, second = np.sort(row)[::-1][:2]
        return int(row.argmax()), float(first - second)
    probs = distribution(logits, wanted)
    if is_filtered(params):
        return race(probs, params.seed, position)
    size = 128 if len(logits) <= 16_384 else 512
    parts: dict[int, float] = defaultdict(float)
    for i, p in probs.items():
        parts[-1 - i // size] += p
    part, margin = race(parts, params.seed, position)
    choice, margin_in_part = race({i: p for i, p in probs.items() if -1 - i // size == part}, params.seed, position)
    return choice, min(margin, margin_in_part)


def race(weights: Mapping[int, float], seed: int, position: int) -> tuple[int, float]:
    """Returns the token that arrives first and its relative margin."""
    [times] = arrival_times(noise_keys([seed], [position], torch.device("cpu")), torch.tensor(list(weights))).tolist()
    order = sorted((time / weight, i) for (i, weight), time in zip(weights.items(), times, strict=True) if weight)
    return order[0][1], order[1][0] / order[0][0] - 1 if len(order) > 1 else 1.0


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 40]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.3]),
    logit_bias=st.sampled_from([(), (), ((3, 5.0), (7, -100.0)), ((0, 100.0),)]),
    allowed_token_ids=st.sampled_from([(), (), (0, 3, 5, 7, 9, 11, 13, 15), tuple(range(10, 50))]),
    seed=st.integers(0, 2**63 - 1),
)
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12)
plain_samples_strategy = st.builds(
    Sample,
    params=params_strategy,
    prompt_token_ids=token_ids,
    output_token_ids=token_ids,
    banned_token_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=3),
)


@st.composite
def samples_strategy_with_bad_words(draw: st.DrawFn) -> Sample:
    """Some of the bad words are about to be completed."""
    drawn = draw(plain_samples_strategy)
    output = tuple(drawn.output_token_ids)
    tails = st.integers(0, min(3, len(output))).map(lambda length: output[len(output) - length :])
    befores = st.one_of(tails, st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2).map(tuple))
    words = st.builds(lambda before, last: (*before, last), befores, st.integers(0, VOCAB_SIZE - 1))
    bad_words = tuple(draw(st.lists(words, max_size=3)))
    return msgspec.structs.replace(drawn, params=msgspec.structs.replace(drawn.params, bad_words=bad_words))


samples_strategy = samples_strategy_with_bad_words()


def check_against_reference(rows: list[tuple[Sample, int]], logits: torch.Tensor) -> None:
    chosen = sample(logits, [wanted for wanted, _ in rows], [position for _, position in rows])
    for i, (wanted, position) in enumerate(rows):
        expected, margin = reference(logits[i].numpy(), wanted, position)
        # Near a tie float32 and float64 may differ; then either choice is right.
        assert chosen[i].token_id == expected or margin < 1e-6


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(samples_strategy, st.integers(0, 100_000)), min_size=1, max_size=8), noise=st.integers())
def test_each_row_equals_the_reference(rows: list[tuple[Sample, int]], noise: int) -> None:
    generator = torch.Generator().manual_seed(noise % 2**32)
    check_against_reference(rows, torch.randn(len(rows), VOCAB_SIZE, generator=generator) * 3)


@pytest.mark.parametrize("vocab_size", [1300, pytest.param(20_000, marks=pytest.mark.extended)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_vocabularies_of_many_segments_equal_the_reference(vocab_size: int, temperature: float) -> None:
    rows = [(Sample(SamplingParams(temperature=temperature, seed=seed)), 7 * seed) for seed in range(20)]
    logits = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(2)) * 2
    check_against_reference(rows, logits)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(samples_strategy, st.integers(0, 100_000)), min_size=1, max_size=6),
    noise=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    is_coarse=st.booleans(),
)
def test_candidates_choose_like_a_full_sort(
    rows: list[tuple[Sample, int]], noise: int, spread: float, is_coarse: bool
) -> None:
    """Covers ties, and flat distributions for which the candidates do not suffice."""
    logits = torch.randn(len(rows), 5000, generator=torch.Generator().manual_seed(noise)) * spread
    if is_coarse:
        logits = (logits * 2).round() / 2
    wanted, positions = [w for w, _ in rows], [position for _, position in rows]
    few = sample(logits, wanted, positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tandem.engine.sampling.sampler, "_FULL_SORT_VOCAB_SIZE", 10_000)
        assert few == sample(logits, wanted, positions)


Row = tuple[Sample, int, int | None]
"""A row of logits: what is wanted of it, its position, and the seed of its grammar's mask."""


@st.composite
def rows_strategy(draw: st.DrawFn) -> Row:
    """Rows with every setting: the report of their log-probabilities, a limit on thinking, and a grammar's mask."""
    drawn = draw(samples_strategy)
    logprobs = draw(st.one_of(st.none(), st.integers(0, 20)))
    named = draw(st.sampled_from([(), (), (7,), (3, 59, 1000)])) if logprobs is not None else ()
    thinking = draw(st.sampled_from([None, None, Thinking(True, (7,), (8,), (8, 9), max_tokens=2)]))
    more = {"logprobs": logprobs, "logprob_token_ids": named, "thinking": thinking}
    wanted = msgspec.structs.replace(drawn, params=msgspec.structs.replace(drawn.params, **more))
    return wanted, draw(st.integers(0, 100_000)), draw(st.one_of(st.none(), st.integers(0, 3)))


def grammar_mask(seeds: Sequence[int | None], vocab_size: int) -> StepMask | None:
    """Returns the step's mask. Rows with equal seeds share one, as sequences of one prompt do."""
    rows = [row for row, seed in enumerate(seeds) if seed is not None]
    if not rows:
        return None
    masks = sorted({seed for seed in seeds if seed is not None})
    allowed = np.stack([np.random.default_rng(seed).random(vocab_size) < 0.3 for seed in masks])
    allowed[:, :5] = True
    mask_rows = [masks.index(seed) for seed in seeds if seed is not None]
    return StepMask(rows, mask_rows, np.packbits(allowed, axis=1, bitorder="little"), {})


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(rows_strategy(), min_size=2, max_size=12),
    vocab_size=st.sampled_from([60, 1031, 5000]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    noise=st.integers(0, 2**32 - 1),
    is_coarse=st.booleans(),
)
def test_a_row_does_not_depend_on_its_batch(
    rows: list[Row], vocab_size: int, dtype: torch.dtype, noise: int, is_coarse: bool
) -> None:
    """Tokens and the bits of log-probabilities. Coarse logits are often equal."""
    logits = torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(noise))
    logits = ((logits * 2).round() / 2 if is_coarse else logits).to(dtype)

    def sampled(some: slice) -> list[SampledToken]:
        wanted, positions, seeds = zip(*rows[some], strict=True)
        return sample(logits[some].clone(), wanted, positions, grammar_mask(seeds, vocab_size))

    together = sampled(slice(None))
    assert together == [token for i in range(len(rows)) for token in sampled(slice(i, i + 1))]
    assert together == sampled(slice(1)) + sampled(slice(1, None))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [1, 127, 1031, 5000, 40_003])
def test_weights_of_a_row_have_the_same_bits_in_every_batch(vocab_size: int, num_threads: int) -> None:
    """A weight's last bit would change a token once in millions, which comparing tokens does not find."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits = torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
        totals, weights = log_total(logits), race_weights(logits, None)
        for some in (slice(0, 1), slice(2, 3), slice(3, 9), slice(8, 9)):
            assert torch.equal(log_total(logits[some].clone()), totals[some])
            assert torch.equal(race_weights(logits[some].clone(), None), weights[some])
    finally:
        torch.set_num_threads(before)


def test_equal_log_probabilities_are_listed_by_id_however_many_are_wanted() -> None:
    logits = torch.zeros(2, 5000, dtype=torch.bfloat16)
    logits[1, [4000, 70, 2, 999]] = torch.tensor([3.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)
    for num in (1, 3, 20, 300):
        params = [SamplingParams(temperature=0.0, logprobs=each) for each in (num, 5)]
        tokens = sample(logits, [Sample(each) for each in params], [0, 0])
        listed = [[i for i, _ in token.logprobs.top] for token in tokens if token.logprobs is not None]
        assert listed == [list(range(num)), [4000, 2, 70, 999, 0]]


CHI_SQUARE_LIMIT_11 = 31.3
"""The 0.1 % point at 11 degrees of freedom."""


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(Sample(SamplingParams(temperature=0.8)), id="temperature"),
        pytest.param(Sample(SamplingParams(top_k=5)), id="top_k"),
        pytest.param(Sample(SamplingParams(top_p=0.8)), id="top_p"),
        pytest.param(Sample(SamplingParams(min_p=0.1)), id="min_p"),
        pytest.param(
            Sample(
                SamplingParams(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
                [1, 2, 3],
                [2, 2, 6],
            ),
            id="penalties",
        ),
        pytest.param(
            Sample(
                SamplingParams(temperature=1.3, top_k=9, top_p=0.95, min_p=0.02, logit_bias=((4, 1.5),)), [], [], {0}
            ),
            id="everything",
        ),
    ],
)
def test_samples_follow_the_requested_distribution(wanted: Sample) -> None:
    """Chi-square over 12 tokens and 20,000 positions."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, 0.2, -2.0, 0.7, -0.3, 1.2])
    num_draws = 20_000
    seeded = Sample(
        SamplingParams(**{f: getattr(wanted.params, f) for f in wanted.params.__struct_fields__} | {"seed": 42}),
        wanted.prompt_token_ids, wanted.output_token_ids, wanted.banned_token_ids,
    )  # fmt: skip
    tokens = sample(logits.expand(num_draws, -1), [seeded] * num_draws, list(range(num_draws)))
    counts = Counter(token.token_id for token in tokens)
    probs = distribution(logits.numpy(), seeded)
    assert set(counts) <= set(probs), "filtered tokens are never sampled"
    chi_square = sum((counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in probs.items())
    assert chi_square < CHI_SQUARE_LIMIT_11


@settings(max_examples=60, deadline=None)
@given(
    noise=st.integers(0, 2**32 - 1),
    num_top=st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_logprobs_are_those_of_the_unmodified_logits(noise: int, num_top: list[int | None], dtype: torch.dtype) -> None:
    logits = (torch.randn(len(num_top), 40, generator=torch.Generator().manual_seed(noise)) * 4).to(dtype)
    wanted = [Sample(SamplingParams(temperature=0.7, top_k=3, logit_bias=((2, 9.0),), logprobs=n)) for n in num_top]
    for row, token, n in zip(logits.double().numpy(), sample(logits, wanted, [5] * len(wanted)), num_top, strict=True):
        if n is None:
            assert token.logprobs is None
            continue
        expected = row - row.max() - math.log(np.exp(row - row.max()).sum())
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(expected[token.token_id], abs=1e-5)
        assert token.logprobs.rank == 1 + int((row > row[token.token_id]).sum())
        assert [p for _, p in token.logprobs.top] == pytest.approx(sorted(expected, reverse=True)[:n], abs=1e-5)
        assert all(p == pytest.approx(expected[i], abs=1e-5) for i, p in token.logprobs.top)
        assert len({i for i, _ in token.logprobs.top}) == n


def test_named_logprobs_are_those_of_the_sampled_token_and_the_named_ones() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    params = [
        SamplingParams(temperature=0, logprobs=3, logprob_token_ids=(7, 39, 40)),
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(temperature=0, logprobs=2, logprob_token_ids=(int(logits[2].argmax()),)),
    ]
    named, likeliest, own = sample(logits, [Sample(p) for p in params], [0, 0, 0])
    assert named.logprobs is not None and likeliest.logprobs is not None and own.logprobs is not None
    assert [i for i, _ in named.logprobs.top] == [named.token_id, 7, 39], "40 is beyond the vocabulary"
    assert [p for _, p in named.logprobs.top] == pytest.approx([float(expected[0, i]) for i, _ in named.logprobs.top])
    assert [i for i, _ in likeliest.logprobs.top] == logits[1].topk(2).indices.tolist()
    assert [i for i, _ in own.logprobs.top] == [own.token_id]


def test_equal_logits_choose_the_first_when_greedy() -> None:
    greedy = Sample(SamplingParams(temperature=0.0))
    assert sample(torch.zeros(2, 5), [greedy] * 2, [3, 4]) == [SampledToken(0)] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5)], ids=str
)
def test_a_row_of_nan_does_not_affect_others(value: float, params: SamplingParams) -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    expected = sample(logits[:1], [Sample(params)], [0])
    logits[1] = value
    tokens = sample(logits, [Sample(params)] * 2, [0, 0])
    assert tokens[:1] == expected
    assert 0 <= tokens[1].token_id < 30
    [alone] = sample(logits[1:], [Sample(params)], [0])
    assert 0 <= alone.token_id < 30


def test_greedy_batches_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy batch is one argmax."""
    seen: list[torch.Tensor] = []
    argmax = tandem.engine.sampling.sampler.argmax
    monkeypatch.setattr(tandem.engine.sampling.sampler, "argmax", lambda logits: seen.append(logits) or argmax(logits))
    logits = torch.randn(3, 9)
    step = SamplingStep([Sample(SamplingParams(temperature=0.0))] * 3, [0, 1, 2], 9)
    step.run(logits, [])
    assert seen[0] is logits and not step.arrays


@pytest.mark.parametrize("vocab_size", [3, 127, 128, 129, 1300, 20_000])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.7), SamplingParams(top_p=0.99)], ids=str)
def test_impossible_tokens_are_not_chosen(vocab_size: int, params: SamplingParams) -> None:
    """Impossible tokens before, between and after the possible ones, and whole segments of them."""
    rows = torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0))
    rows[torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) < 0.7] = float("-inf")
    rows[:, 520:1100] = float("-inf")
    rows[:, 1] = 0.0
    chosen = sample(rows, [Sample(params)] * 64, range(64))
    for row, token in zip(rows, chosen, strict=True):
        assert math.isfinite(row[token.token_id])


def test_the_end_of_thinking_is_forced_in_its_own_row_only() -> None:
    thinking = Thinking(True, (7,), (8,), (8, 9), max_tokens=2)
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    plain = SamplingParams(temperature=0.0)
    limited = SamplingParams(temperature=0.0, thinking=thinking, allowed_token_ids=(1, 2))
    rows = [Sample(plain), Sample(limited, output_token_ids=[1, 2]), Sample(limited, output_token_ids=[1, 2, 8])]
    best = int(logits[0].argmax())
    assert [token.token_id for token in sample(logits, rows, [0, 2, 3])] == [best, 8, 9]
    ended = [Sample(plain), *(Sample(limited, output_token_ids=out) for out in ([1], [8, 1]))]
    assert all(token.token_id in (1, 2) for token in sample(logits, ended, [0, 1, 2])[1:])


def test_token_lists_of_a_request_become_arrays_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences differ in their seeds and share the lists; the work of a step must not grow with their length."""
    made: list[object] = []
    make = penalties._is_allowed
    monkeypatch.setattr(penalties, "_allowed_once", penalties._MadeOnce(lambda ids: made.append(ids) or make(ids)))
    request = SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(4, 20)))
    samples = [Sample(msgspec.structs.replace(request, seed=seed)) for seed in range(5)]
    for _ in range(3):
        step = SamplingStep(samples, [1] * 5, 32)
    assert len(made) == 1
    assert [array.shape for array in step.arrays if array.dtype == np.bool_] == [(1, 32)], "one mask for all"
