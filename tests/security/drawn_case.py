"""What one client sends and how it behaves, drawn as a product of dimensions. Pure: no socket, no clock.

A case is a value for each dimension: a route, a field at its largest, sequences, length of the prompt and of
the answer, media, requests at once, and what the client does with its connection. `drawn` takes each from a random
generator, so that a seed names a case; `pairwise` returns few cases in which each two values of different dimensions
occur together.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Any, Literal, get_args

import msgspec

from tandem.proxy.api.schema import NotServed
from tests.security.hostile_client import Behaviour

Media = Literal["none", "small", "large", "many"]

PATHS = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
    "response": "/v1/responses",
    "message": "/v1/messages",
    "embedding": "/v1/embeddings",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "count_tokens": "/v1/messages/count_tokens",
    "batch": "/v1/batches",
    "download": "/v1/files/{file_id}/content",
}
"""Path of each route. Lines of a batch are completions; a download has no body."""
GENERATING = ("completion", "chat", "chat", "response", "message")
"""Drawn more often than others."""
MEDIA_ROUTES = ("chat", "response", "message")
DIMENSIONS: dict[str, Sequence[Any]] = {
    "route": (*GENERATING, *GENERATING, *PATHS),
    "shape": ("schema", "grammar", "texts", "numbers", "map", "count", "nested", "text"),
    "is_costliest": (True, False),
    "size": (7_000, 60_000, 450_000),
    "n": (1, 8, 60, 128),
    "num_prompt_tokens": (4, 1000, 9000),
    "max_tokens": (1, 30, 200),
    "is_forced": (False, True),
    "media": ("none", "small", "large", "many"),
    "at_once": (1, 4, 30, 100, 130),
    "client": get_args(Behaviour),
}
MAX_TOKENS = 20_000
"""Tokens that a case generates at most. More requests or sequences get shorter answers."""
MAX_BYTES = 32 << 20
"""Bytes that a case sends at most."""


class Case(msgspec.Struct, frozen=True):
    """seed: draws the largest value. shape: its kind. is_costliest: it is one of the few of its shape that take
    longest to read; else any. is_forced: the answer is the letter that the largest values are made of."""

    seed: str
    route: str
    shape: str
    is_costliest: bool
    size: int
    n: int
    num_prompt_tokens: int
    max_tokens: int
    is_forced: bool
    media: Media
    at_once: int
    client: Behaviour

    def __str__(self) -> str:
        return (
            f"{self.route}: {self.shape} of {self.size // 1000} kB, n {self.n}, prompt {self.num_prompt_tokens}, "
            f"max_tokens {self.max_tokens}{' forced' if self.is_forced else ''}, media {self.media}, "
            f"{self.at_once} at once, client {self.client}"
        )


def drawn(seed: str, only: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> Case:
    """only: values of some dimensions, in place of all."""
    rng = random.Random(seed)
    return _case(seed, {name: rng.choice(values) for name, values in (DIMENSIONS | dict(only)).items()})


def covering(seed: str, dimensions: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Returns the cases of `pairwise`. Dimensions that are not named have their first value."""
    plain = {name: values[0] for name, values in DIMENSIONS.items()}
    return [_case(f"{seed}/{number}", plain | row) for number, row in enumerate(pairwise(dimensions, seed))]


def _case(seed: str, values: dict[str, Any]) -> Case:
    """Makes values fit together: media where messages are, and bounded tokens and bytes."""
    values = dict(values)
    if values["route"] not in MEDIA_ROUTES:
        values["media"] = "none"
    values["at_once"] = min(values["at_once"], max(1, MAX_BYTES // values["size"]))
    values["max_tokens"] = max(1, min(values["max_tokens"], MAX_TOKENS // (values["at_once"] * values["n"])))
    return Case(seed, **values)


def shape_of(name: str) -> str:
    """Returns the kind of a largest value, by its name."""
    for shape, pattern in _SHAPES.items():
        if pattern.search(name):
            return shape
    return "text"


_SHAPES = {
    "schema": re.compile(r"(Of|ties|[iI]tems) of \d+ times |references|alternatives deep|a large pattern"),
    "grammar": re.compile(
        r"ambiguous|optional|repetitions|late letter|alternatives with|rules|doubles|options|template"
    ),
    "texts": re.compile(r"\[\] \d+ texts of \d+ with one beginning"),
    "numbers": re.compile(r"different numbers"),
    "map": re.compile(r"of \d+ keys"),
    "count": re.compile(r" (largest|smallest|\d+)$"),
    "nested": re.compile(r" deep$|nested"),
}
NEUTRAL_FIELDS = {
    "model", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens", "stream", "timeout",
    *(field.name for field in msgspec.structs.fields(NotServed)),
}  # fmt: skip
"""Fields that other dimensions set, and those that are refused whatever they are."""


def field_of(name: str) -> str:
    """Returns the field of a largest value, by the value's name."""
    found = re.match(r"\w*", name)
    return found[0] if found else ""


def pairwise(dimensions: Mapping[str, Sequence[Any]], seed: str) -> list[dict[str, Any]]:
    """Returns rows in which each two values of different dimensions occur together, greedily."""
    rng = random.Random(seed)
    names = list(dimensions)
    left = {
        (one, a, other, b) for one, other in combinations(names, 2) for a in dimensions[one] for b in dimensions[other]
    }
    rows = []
    while left:
        best, most = {}, -1
        for _ in range(30):
            row = {name: rng.choice(dimensions[name]) for name in names}
            one, a, other, b = rng.choice(sorted(left, key=str)[:50])
            row[one], row[other] = a, b
            covered = sum(pair in left for pair in _pairs(row))
            if covered > most:
                best, most = row, covered
        left -= set(_pairs(best))
        rows.append(best)
    return rows


def _pairs(row: dict[str, Any]) -> list[tuple[str, Any, str, Any]]:
    return [(one, row[one], other, row[other]) for one, other in combinations(row, 2)]
