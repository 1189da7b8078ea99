"""Makes chats of any length for the training. Exercises of the exam never occur in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from tools.demo_model.lessons import LESSONS, Lessons, Turn
from tools.demo_model.memory import KINDS, about_list, numbered_list
from tools.demo_model.stories import story
from tools.demo_model.texts import TEXTS

MOODS = tuple(TEXTS.system_messages)
"""The first mood applies to chats without a system message."""


def small_talk(rng: Random, mood: str) -> Turn:
    topic = rng.choice(TEXTS.topics)
    question = rng.choice(topic.questions)
    return Turn(question, topic.answers[MOODS.index(mood)], f"talk {mood} {question}")


def about_tandem(rng: Random) -> Turn:
    fact = rng.choice(TEXTS.facts)
    question = rng.choice(fact.questions)
    return Turn(question, fact.answer, f"fact {question}")


_EXAM_SHARE = 16
"""One in this many exercises is reserved for the exam."""


class Chat(NamedTuple):
    """`system` is None in a chat without a system message, whose mood is friendly."""

    system: str | None
    turns: list[Turn]


class Stage(NamedTuple):
    """Mix of a training stage.

    `keeps_list_share`: share of the long chats that ask about one list until the end. `asked_share`: share of their
    turns that do. `list_kinds`: kinds of these questions.
    """

    lessons: Lessons
    keeps_list_share: float = 0.5
    asked_share: float = 0.4
    list_kinds: tuple[str, ...] = KINDS


def is_kept_for_exam(turn: Turn) -> bool:
    """Small talk, facts and stories are never reserved: the model learns them by heart."""
    if turn.key.startswith(("talk ", "fact ", "story ")):
        return False
    return hashlib.blake2b(turn.key.encode(), digest_size=4).digest()[0] % _EXAM_SHARE == 0


def exercise(rng: Random, *, for_exam: bool = False, name: str | None = None, lessons: Lessons = LESSONS) -> Turn:
    """Returns an exercise of lesson `name`, or of a random lesson by share, reserved for the exam or not."""
    if name is None:
        name = rng.choices(list(lessons), [share for share, _ in lessons.values()])[0]
    while True:
        turn = lessons[name][1](rng)
        if is_kept_for_exam(turn) == for_exam:
            return turn


def opening(rng: Random) -> tuple[str | None, str]:
    """Returns a system message or None, and the mood that it asks for."""
    if rng.random() < 0.4:
        return None, MOODS[0]
    mood = rng.choice(MOODS)
    return rng.choice(TEXTS.system_messages[mood]), mood


def training_chat(rng: Random, num_turns: int, stage: Stage, *, keeps_list: bool = False) -> Chat:
    """Makes a chat. With `keeps_list` its first turn gives a list, and later turns ask about it until the end."""
    system, mood = opening(rng)
    return Chat(system, list(_turns(rng, mood, num_turns, stage, keeps_list)))


def _turns(rng: Random, mood: str, num_turns: int, stage: Stage, keeps_list: bool) -> Iterator[Turn]:
    items: list[str] | None = None
    if keeps_list:
        turn, items = numbered_list(rng)
        yield turn
        num_turns -= 1
    for _ in range(num_turns):
        dice = rng.random()
        if items is not None and dice < stage.asked_share:
            yield _not_for_exam(rng, items, stage.list_kinds)
        elif dice < 0.06 or 0.4 <= dice < 0.44:
            yield small_talk(rng, mood)
        elif dice < 0.1 or 0.44 <= dice < 0.48:
            yield about_tandem(rng)
        elif 0.48 <= dice < 0.49:
            yield story(rng)
        elif 0.49 <= dice < 0.61 and not keeps_list:
            turn, items = numbered_list(rng)
            yield turn
        else:
            yield exercise(rng, lessons=stage.lessons)


def _not_for_exam(rng: Random, items: list[str], kinds: tuple[str, ...]) -> Turn:
    while is_kept_for_exam(turn := about_list(rng, items, kinds)):
        pass
    return turn


def all_small_talk() -> Iterator[Chat]:
    """Yields a chat for every question of each topic in each mood, and of each fact."""
    for mood in MOODS:
        for topic in TEXTS.topics:
            for question in topic.questions:
                answer = topic.answers[MOODS.index(mood)]
                yield Chat(TEXTS.system_messages[mood][0], [Turn(question, answer, f"talk {mood} {question}")])
    for fact in TEXTS.facts:
        for question in fact.questions:
            yield Chat(None, [Turn(question, fact.answer, f"fact {question}")])
