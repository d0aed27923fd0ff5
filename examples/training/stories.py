"""Builds the stories of the training questions from animals, objects, places and characters.

Each of these words adds its own sentence to a story. A story is a function of its prompt, so that an answer is right or wrong.
``questions.py`` splits the prompts into training and held-out ones. It uses the standard library only.
"""

from __future__ import annotations

import random

_CHARACTERS = {
    "brave": "It was afraid of nothing.",
    "clever": "It knew many tricks.",
    "curious": "It asked many questions.",
    "happy": "It sang all day long.",
    "hungry": "It dreamed of a big lunch.",
    "kind": "It helped everyone it met.",
    "lazy": "It slept until noon.",
    "old": "It had seen many winters.",
    "proud": "It held its head high.",
    "shy": "It hardly ever spoke.",
    "tiny": "It was as small as a leaf.",
    "young": "It wanted to see the world.",
}

_HOMES = {
    "ant": "hill",
    "bear": "den",
    "bee": "hive",
    "cat": "house",
    "cow": "barn",
    "crow": "nest",
    "deer": "wood",
    "dog": "house",
    "duck": "pond",
    "fox": "den",
    "frog": "pond",
    "goat": "barn",
    "hen": "barn",
    "horse": "barn",
    "lion": "den",
    "monkey": "tree",
    "mouse": "hole",
    "owl": "nest",
    "pig": "barn",
    "rabbit": "hole",
    "sheep": "barn",
    "tiger": "den",
    "turtle": "pond",
    "wolf": "den",
}

_OBJECTS = {
    "ball": "rolled down the road",
    "basket": "was full of berries",
    "bell": "rang loud and clear",
    "blanket": "was soft and warm",
    "boat": "floated on the water",
    "book": "was full of tales",
    "candle": "burned until morning",
    "clock": "told the right time",
    "coin": "was made of gold",
    "cup": "was full of honey",
    "drum": "made the hills shake",
    "feather": "was blue and green",
    "flute": "played a sweet song",
    "hat": "was much too big",
    "key": "opened an old door",
    "kite": "flew above the clouds",
    "ladder": "reached up to the moon",
    "lamp": "shone all night long",
    "map": "showed the way home",
    "mirror": "showed a smiling face",
    "ring": "sparkled in the sun",
    "rope": "was long and strong",
    "stone": "was round and smooth",
    "wagon": "had four red wheels",
}

_PLACES = {
    "beach": "the sand was warm",
    "castle": "the walls were high",
    "cave": "it was cold and dark",
    "city": "the streets were busy",
    "desert": "the sun was hot",
    "farm": "the corn was ripe",
    "forest": "the trees were tall",
    "garden": "the roses were red",
    "harbor": "the ships came in",
    "island": "the sea was blue",
    "market": "the people were loud",
    "meadow": "the grass was green",
    "mountain": "the snow was deep",
    "river": "the water was fast",
    "valley": "the wind was soft",
    "village": "the children played",
}

NUM_STORIES = len(_HOMES) * len(_OBJECTS) * (1 + len(_CHARACTERS) * len(_PLACES))
"""How many different prompts there are, long and short ones together."""


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def long_story(character: str, animal: str, thing: str, place: str) -> tuple[str, str]:
    """The prompt that names all four words, and its story."""
    hero = f"{_article(character)} {character} {animal}"
    return (
        f"Tell a story about {hero} and {_article(thing)} {thing} near the {place}.",
        f" Once there was {hero}. {_CHARACTERS[character]} One day the {animal} went to the {place}, where {_PLACES[place]}."
        f" There it found {_article(thing)} {thing} that {_OBJECTS[thing]}. The {animal} took the {thing} home to its {_HOMES[animal]}.",
    )


def short_story(animal: str, thing: str) -> tuple[str, str]:
    """The prompt that names only the animal and the object, and its story."""
    return (
        f"Tell a story about {_article(animal)} {animal} and {_article(thing)} {thing}.",
        f" Once there was {_article(animal)} {animal}. One day it found {_article(thing)} {thing} that {_OBJECTS[thing]}."
        f" The {animal} took the {thing} home to its {_HOMES[animal]}.",
    )


def random_story(rng: random.Random) -> tuple[str, str]:
    """Draw a prompt and its story; one in five is short."""
    animal, thing = rng.choice(tuple(_HOMES)), rng.choice(tuple(_OBJECTS))
    if rng.random() < 0.2:
        return short_story(animal, thing)
    return long_story(rng.choice(tuple(_CHARACTERS)), animal, thing, rng.choice(tuple(_PLACES)))
