"""Whole chats: a mood, then turns of every kind, as long as asked. What the exam asks never occurs in the training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from bench.demo_model.lessons import LESSONS, Lessons, Turn
from bench.demo_model.memory import KINDS, about_list, numbered_list
from bench.demo_model.small_talk import FACTS, MOODS, SYSTEM_MESSAGES, TOPICS, about_tandem, small_talk
from bench.demo_model.stories import story

_EXAM_SHARE = 16
"""One in so many keys of exercises is the exam's."""


class Chat(NamedTuple):
    """system: None where the chat has no system message; its mood is friendly then."""

    system: str | None
    turns: list[Turn]


class Stage(NamedTuple):
    """Of the training. keeps_list_share: of the long chats, those that ask for one list to the end. asked_share: of
    their turns. list_kinds: what they ask.
    """

    lessons: Lessons
    keeps_list_share: float = 0.5
    asked_share: float = 0.4
    list_kinds: tuple[str, ...] = KINDS


def is_kept_for_exam(turn: Turn) -> bool:
    """Small talk and facts about Tandem are few and learnt by heart: they are in both."""
    if turn.key.startswith(("talk ", "fact ", "story ")):
        return False
    return hashlib.blake2b(turn.key.encode(), digest_size=4).digest()[0] % _EXAM_SHARE == 0


def exercise(rng: Random, *, for_exam: bool = False, name: str | None = None, lessons: Lessons = LESSONS) -> Turn:
    """One of the lessons (`name`, or any, by their shares), from the exam's part or from the training's."""
    if name is None:
        name = rng.choices(list(lessons), [share for share, _ in lessons.values()])[0]
    while True:
        turn = lessons[name][1](rng)
        if is_kept_for_exam(turn) == for_exam:
            return turn


def opening(rng: Random) -> tuple[str | None, str]:
    """A system message or none, and the mood that it asks for."""
    if rng.random() < 0.4:
        return None, MOODS[0]
    mood = rng.choice(MOODS)
    return rng.choice(SYSTEM_MESSAGES[mood]), mood


def training_chat(rng: Random, num_turns: int, stage: Stage, *, keeps_list: bool = False) -> Chat:
    """keeps_list: the first turn gives a list, which is asked for to the end."""
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
    """Each topic in each mood, and each fact."""
    for mood in MOODS:
        for topic in TOPICS:
            for question in topic.questions:
                answer = topic.answers[MOODS.index(mood)]
                yield Chat(SYSTEM_MESSAGES[mood][0], [Turn(question, answer, f"talk {mood} {question}")])
    for fact in FACTS:
        for question in fact.questions:
            yield Chat(None, [Turn(question, fact.answer, f"fact {question}")])
