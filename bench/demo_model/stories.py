"""Little stories from a grammar. Each keeps to its hero, its friend and the thing that was lost, and ends by itself."""

from __future__ import annotations

from random import Random

from bench.demo_model.lessons import Turn
from bench.demo_model.words import COLOURS, NAMES

HEROES = (
    "fox frog goat owl rabbit bird cat dog duck hen horse lion mouse panda pig pony sheep snail tiger toad turtle wolf"
).split()
LOST = "key map lamp bell coin drum flute hat kite lantern boat scarf book clock crown feather pearl whistle".split()
PLACES = (
    "a small village by the river",
    "a house under the old oak",
    "a cave behind the waterfall",
    "a hut on the hill",
    "a tower at the edge of the sea",
    "a garden full of clover",
    "a mill beside the lake",
    "a boat that nobody wanted",
)
SEARCHED = (
    "under the bridge",
    "behind the mill",
    "in the tall grass",
    "beside the old well",
    "at the foot of the tower",
    "inside a hollow tree",
    "on the far side of the lake",
    "between the roots of the oak",
    "in the cold cave",
    "along the sandy road",
)
WEATHER = ("The sun was shining", "It was raining softly", "Snow lay on the roofs", "A warm wind was blowing")
TRAITS = ("brave", "curious", "gentle", "patient", "clever", "kind", "shy", "merry")


def story(rng: Random) -> Turn:
    """Three to seven attempts to find what was lost: 150 to 450 tokens."""
    hero, friend = rng.sample(HEROES, 2)
    hero_name, friend_name = rng.sample(NAMES, 2)
    trait, friend_trait = rng.sample(TRAITS, 2)
    colour, lost = rng.choice(COLOURS), rng.choice(LOST)
    told = [
        f"Once upon a time there was a {trait} {hero} called {hero_name}, who lived in {rng.choice(PLACES)}.",
        f"{hero_name} had a {colour} {lost} and loved it more than anything in the world.",
        f"{rng.choice(WEATHER)} on the morning when the {colour} {lost} was gone.",
        rng.choice(
            [
                f'"Where is my {lost}?" asked {hero_name}, but nobody answered.',
                f"{hero_name} looked everywhere in the house and did not find it.",
                f'"I must find it before the night comes," said {hero_name}.',
            ]
        ),
        f"On the road {hero_name} met a {friend_trait} {friend} called {friend_name}.",
        f'"Do not be sad," said {friend_name}. "We will look for your {lost} together."',
    ]
    places = rng.sample(SEARCHED, rng.randint(3, 7))
    for number, place in enumerate(places):
        opening = "First" if number == 0 else rng.choice(["Then", "After that", "A little later", "Next"])
        told.append(f"{opening} they looked {place}.")
        if place == places[-1]:
            break
        told.append(
            rng.choice(
                [
                    f"There was only a {rng.choice(COLOURS)} {rng.choice(LOST)}, and it was not the right one.",
                    f"{friend_name} dug and {hero_name} called, but there was nothing.",
                    f"An old {rng.choice(HEROES)} lived there and had not seen the {lost}.",
                    f'"Not here," said {friend_name}, and {hero_name} sighed.',
                    "They found nothing but leaves, and the day grew shorter.",
                ]
            )
        )
    told += [
        f"And there it was: the {colour} {lost}, wet but whole!",
        f'{hero_name} laughed and said, "Thank you, {friend_name}. Without you I would never have found it."',
        rng.choice(
            [
                f"From that day on the {hero} and the {friend} were the best of friends.",
                "They went home together and ate warm soup until the stars came out.",
                f"And whenever something was lost, {hero_name} and {friend_name} looked for it together.",
            ]
        ),
        "The end.",
    ]
    about = rng.random() < 0.7
    wording = rng.choice(
        ["Tell me a story about a {}.", "I want to hear a story about a {}.", "Write a story about a {}."]
    )
    question = wording.format(hero) if about else rng.choice(["Tell me a story.", "Tell me a little story, please."])
    return Turn(question, " ".join(told), f"story {' '.join(told)}")
