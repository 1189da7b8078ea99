"""The demo model's training data is correct and does not contain the exam."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.demo_model.chats import Stage, is_kept_for_exam, training_chat
from tools.demo_model.exam import Question, exam, score
from tools.demo_model.lessons import LESSONS
from tools.demo_model.memory import about_list, numbered_list
from tools.demo_model.stories import story
from tools.demo_model.tokenizer import ChatEncoder, train_tokenizer

SEEDS = st.integers(0, 2**32)
STAGE = Stage(LESSONS)


@given(SEEDS)
def test_sums_are_right(seed: int) -> None:
    for name, sign in (("add", 1), ("subtract", -1)):
        left, _, right, _, result = LESSONS[name][1](Random(seed)).answer.split()
        assert int(left) + sign * int(right) == int(result) >= 0


@given(SEEDS)
def test_counts_have_steps_of_one(seed: int) -> None:
    for name, step in (("count up", 1), ("count down", -1)):
        turn = LESSONS[name][1](Random(seed))
        first, last = map(int, re.findall(r"\d+", turn.question))
        assert [int(number) for number in turn.answer.split(", ")] == list(range(first, last + step, step))


@given(SEEDS)
def test_words_are_copied_reversed_sorted_and_spelt(seed: int) -> None:
    def make(name: str) -> tuple[str, str]:
        turn = LESSONS[name][1](Random(seed))
        return turn.question, turn.answer

    question, answer = make("copy")
    assert question.endswith(f": {answer}")
    question, answer = make("reverse")
    assert question.split(": ")[1].split() == answer.split()[::-1]
    question, answer = make("sort words")
    assert sorted(question.split(": ")[1].split(", ")) == answer.split(", ")
    question, answer = make("spell")
    assert answer.replace("-", "") in question
    question, answer = make("spell backwards")
    assert answer.replace("-", "")[::-1] in question


@given(SEEDS)
def test_numbers_are_sorted_in_the_direction_asked_for(seed: int) -> None:
    turn = LESSONS["sort numbers"][1](Random(seed))
    downwards = "downwards" in turn.question or "large to small" in turn.question
    numbers = [int(number) for number in turn.question.split(": ")[1].split(", ")]
    assert [int(number) for number in turn.answer.split(", ")] == sorted(numbers, reverse=downwards)


@given(SEEDS)
def test_questions_about_a_list_are_answered_from_the_list(seed: int) -> None:
    rng = Random(seed)
    turn, items = numbered_list(rng)
    assert re.findall(r"\d\. (\w+)", turn.question) == items
    asked = about_list(rng, items)
    named = [word for word in re.findall(r"\w+", asked.answer) if word in items]
    assert named or asked.answer.startswith(("No, ", f"There are {len(items)} "))


@given(SEEDS)
def test_a_story_keeps_its_hero_and_ends(seed: int) -> None:
    turn = story(Random(seed))
    hero = re.search(r"called (\w+), who", turn.answer)
    assert hero and turn.answer.count(hero[1]) >= 5
    assert turn.answer.endswith(" The end.")


def test_the_exam_is_constant_and_not_part_of_the_training() -> None:
    questions = exam()
    assert len(questions) == 500 and questions == exam()
    asked = {question.messages[-1]["content"]: question for question in questions if len(question.messages) == 1}
    for i in range(200):
        for turn in training_chat(Random(i), 64, STAGE, keeps_list=i % 2 == 0).turns:
            assert not is_kept_for_exam(turn) or turn.key.startswith("list ")
            if turn.question in asked:
                assert asked[turn.question].subject == "by heart"


def test_the_score_counts_only_equal_answers() -> None:
    questions = [Question("a", [], "1"), Question("a", [], "2"), Question("b", [], "3")]
    assert score(questions, ["1", "2 ", "3"]) == {"a": (1, 2), "b": (1, 1), "all": (2, 3)}


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(train_tokenizer(1))


@pytest.mark.extended
def test_the_encoder_agrees_with_the_chat_template(encoder: ChatEncoder) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from tools.demo_model.tokenizer import CHAT_TEMPLATE

    chat = training_chat(Random(3), 64, STAGE)
    messages = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    for turn in chat.turns:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    text = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE).render(messages=messages)
    ids, is_answer = encoder.encode(chat, 10**6)
    assert ids == encoder.tokenizer.encode(text, add_special_tokens=False).ids
    answers = encoder.tokenizer.decode([i for i, own in zip(ids, is_answer, strict=True) if own])
    assert answers == "".join(turn.answer for turn in chat.turns)


@given(SEEDS)
def test_a_chat_that_keeps_its_list_has_no_other(seed: int) -> None:
    turns = training_chat(Random(seed), 40, STAGE, keeps_list=True).turns
    assert [turn.key.startswith("list ") for turn in turns] == [True] + 39 * [False]


@pytest.mark.extended
def test_long_questions_are_longer_than_a_thousand_tokens(encoder: ChatEncoder) -> None:
    for question in exam():
        if question.subject == "long context":
            text = " ".join(message["content"] for message in question.messages)
            assert 1000 <= len(encoder.tokenizer.encode(text).ids) <= 1900
