"""The demo model's exam: 500 fixed questions with one right answer each. None of the exercises occurs in the training.

Small talk and facts about Tandem do occur there: they are few, and to be known by heart.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from bench.demo_model.chats import all_small_talk, exercise, is_kept_for_exam
from bench.demo_model.lessons import Turn
from bench.demo_model.memory import about_list, numbered_list
from bench.demo_model.stories import story

SEED = 500
EXERCISES = {
    "add": 50,
    "subtract": 50,
    "count up": 20,
    "count down": 20,
    "copy": 30,
    "reverse": 40,
    "sort words": 45,
    "sort numbers": 40,
    "spell": 30,
    "spell backwards": 30,
}
NUM_BY_HEART = 70
NUM_LISTS = 45
NUM_LONG = 30
TURNS_BETWEEN = 30
"""Turns between a list and a long question about it: 1,000 tokens and more."""


class Question(NamedTuple):
    """messages: as in a chat request, the last one the user's. The answer counts when it is equal."""

    subject: str
    messages: list[dict[str, str]]
    answer: str


def exam() -> list[Question]:
    """Always the same 500, in the same order."""
    rng = Random(SEED)
    questions: list[Question] = []
    for subject, number in EXERCISES.items():
        for _ in range(number):
            turn = exercise(rng, for_exam=True, name=subject)
            questions.append(Question(subject, [_user(turn.question)], turn.answer))
    for chat in rng.sample(list(all_small_talk()), NUM_BY_HEART):
        turn = chat.turns[0]
        before = [] if chat.system is None else [{"role": "system", "content": chat.system}]
        questions.append(Question("by heart", [*before, _user(turn.question)], turn.answer))
    questions += (_list_question(rng) for _ in range(NUM_LISTS))
    questions += (_long_question(rng) for _ in range(NUM_LONG))
    return questions


def _list_question(rng: Random) -> Question:
    """A list, sometimes something else in between, and then a question about it."""
    told, items = numbered_list(rng)
    between = [exercise(rng) for _ in range(rng.randint(0, 2))]
    return _about_list("list", rng, items, [told, *between])


def _long_question(rng: Random) -> Question:
    """A list, a long talk about other things, and then a question about the list."""
    told, items = numbered_list(rng)
    between = [story(rng) if number % 10 == 9 else exercise(rng) for number in range(TURNS_BETWEEN)]
    return _about_list("long context", rng, items, [told, *between])


def _about_list(subject: str, rng: Random, items: list[str], turns: list[Turn]) -> Question:
    while not is_kept_for_exam(asked := about_list(rng, items)):
        pass
    said = [message for turn in turns for message in (_user(turn.question), _assistant(turn.answer))]
    return Question(subject, [*said, _user(asked.question)], asked.answer)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def score(questions: list[Question], answers: list[str]) -> dict[str, tuple[int, int]]:
    """By subject, and for "all": how many are right, of how many."""
    right: dict[str, tuple[int, int]] = {}
    for question, answer in zip(questions, answers, strict=True):
        for subject in (question.subject, "all"):
            num_right, number = right.get(subject, (0, 0))
            right[subject] = (num_right + (answer == question.answer), number + 1)
    return right


def rows(scores: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str, str]]:
    """For a table: subject, right of all, per cent."""
    for subject, (num_right, number) in scores.items():
        if subject != "all":
            yield subject, f"{num_right} of {number}", f"{100 * num_right / number:.0f}"
    num_right, number = scores["all"]
    yield "all", f"{num_right} of {number}", f"{100 * num_right / number:.1f}"
