"""Short stories from a grammar: a hero loses a thing and finds it together with a friend."""

from __future__ import annotations

from random import Random

from tools.demo_model.lessons import Turn
from tools.demo_model.texts import TEXTS


def story(rng: Random) -> Turn:
    """Returns a story of 150 to 450 tokens with three to seven searches."""
    texts, colours = TEXTS.stories, TEXTS.colours
    hero, friend = rng.sample(texts.heroes, 2)
    hero_name, friend_name = rng.sample(TEXTS.names, 2)
    trait, friend_trait = rng.sample(texts.traits, 2)
    colour, lost = rng.choice(colours), rng.choice(texts.lost)
    lines = [
        f"Once upon a time there was a {trait} {hero} called {hero_name}, who lived in {rng.choice(texts.places)}.",
        f"{hero_name} had a {colour} {lost} and loved it more than anything in the world.",
        f"{rng.choice(texts.weather)} on the morning when the {colour} {lost} was gone.",
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
    places = rng.sample(texts.searched, rng.randint(3, 7))
    for number, place in enumerate(places):
        opening = "First" if number == 0 else rng.choice(["Then", "After that", "A little later", "Next"])
        lines.append(f"{opening} they looked {place}.")
        if place == places[-1]:
            break
        lines.append(
            rng.choice(
                [
                    f"There was only a {rng.choice(colours)} {rng.choice(texts.lost)}, and it was not the right one.",
                    f"{friend_name} dug and {hero_name} called, but there was nothing.",
                    f"An old {rng.choice(texts.heroes)} lived there and had not seen the {lost}.",
                    f'"Not here," said {friend_name}, and {hero_name} sighed.',
                    "They found nothing but leaves, and the day grew shorter.",
                ]
            )
        )
    lines += [
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
    return Turn(question, " ".join(lines), f"story {' '.join(lines)}")
