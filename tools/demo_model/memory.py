"""Lists that the user gives early in a chat and asks about later, which exercises long contexts."""

from __future__ import annotations

from random import Random

from tools.demo_model.lessons import Turn
from tools.demo_model.texts import TEXTS

KINDS = ("number", "ordinal", "after", "before", "last", "count", "whole", "on", "backwards")
"""Kinds of questions about a list."""
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


def numbered_list(rng: Random) -> tuple[Turn, list[str]]:
    """Returns the turn that gives the list, and its items."""
    items = rng.sample(TEXTS.things, rng.randint(3, 8))
    given = " ".join(f"{number}. {item}" for number, item in enumerate(items, start=1))
    wording = rng.choice(["Here is my list: {}", "Please remember this list: {}", "Keep this list in mind: {}"])
    return Turn(wording.format(given), f"I will remember your list of {len(items)} items.", f"list {given}"), items


def about_list(rng: Random, items: list[str], kinds: tuple[str, ...] = KINDS) -> Turn:
    """Returns a question about the most recent list."""
    place = rng.randrange(len(items))
    kind = rng.choice(kinds)
    match kind:
        case "number":
            question = rng.choice(["What is item {} on my list?", "What is number {} on my list?"])
            turn = (question.format(place + 1), f"Item {place + 1} is {items[place]}.")
        case "ordinal":
            turn = (f"What is the {ORDINALS[place]} item on my list?", f"The {ORDINALS[place]} item is {items[place]}.")
        case "after":
            place = rng.randrange(len(items) - 1)
            turn = (f"What comes after {items[place]} on my list?", f"After {items[place]} comes {items[place + 1]}.")
        case "before":
            place = rng.randrange(1, len(items))
            turn = (f"What comes before {items[place]} on my list?", f"Before {items[place]} comes {items[place - 1]}.")
        case "last":
            turn = ("What is the last item on my list?", f"The last item is {items[-1]}.")
        case "count":
            turn = ("How many items are on my list?", f"There are {len(items)} items on your list.")
        case "whole":
            turn = (rng.choice(["Read me my list.", "What is on my list?"]), ", ".join(items))
        case "on":
            if rng.random() < 0.5:
                turn = (f"Is {items[place]} on my list?", f"Yes, {items[place]} is on your list.")
            else:
                other = rng.choice([thing for thing in TEXTS.things if thing not in items])
                turn = (f"Is {other} on my list?", f"No, {other} is not on your list.")
        case _:
            turn = ("Read me my list backwards.", ", ".join(reversed(items)))
    return Turn(*turn, f"{turn[0]} of {' '.join(items)}")
