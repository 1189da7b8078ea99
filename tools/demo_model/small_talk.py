"""Questions with fixed answers: small talk, in the mood that the system message asks for, and facts about Tandem."""

from __future__ import annotations

from random import Random

from tools.demo_model.lessons import Turn
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
