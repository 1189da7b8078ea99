"""Texts of the training data, read from texts.toml: words, parts of stories, small talk and facts about Tandem."""

from __future__ import annotations

from pathlib import Path

import msgspec


class StoryTexts(msgspec.Struct, frozen=True):
    heroes: tuple[str, ...]
    lost: tuple[str, ...]
    places: tuple[str, ...]
    searched: tuple[str, ...]
    weather: tuple[str, ...]
    traits: tuple[str, ...]


class Topic(msgspec.Struct, frozen=True):
    """Small talk with one answer per mood, in the order of the system messages."""

    questions: tuple[str, ...]
    answers: tuple[str, str, str, str]


class Fact(msgspec.Struct, frozen=True):
    """Facts have the same answer in all moods."""

    questions: tuple[str, ...]
    answer: str


class Texts(msgspec.Struct, frozen=True):
    """`system_messages` are by the mood that they ask for; the first mood applies to chats without one."""

    things: tuple[str, ...]
    colours: tuple[str, ...]
    names: tuple[str, ...]
    stories: StoryTexts
    system_messages: dict[str, tuple[str, ...]]
    topics: tuple[Topic, ...]
    facts: tuple[Fact, ...]


TEXTS = msgspec.toml.decode((Path(__file__).parent / "texts.toml").read_bytes(), type=Texts)
