"""Combinations of PEFT's options such that every pair of values that may meet does so."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Combination = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairwise(
    factors: Mapping[str, Sequence[str]], valid: Callable[[Combination], bool], seed: int = 0
) -> list[Combination]:
    """Valid combinations, each the best of some random ones for the pairs that are still open.
    `valid` must hold for parts of a combination if it holds for the whole."""
    rng = random.Random(seed)
    open_pairs = {
        pair
        for one, other in itertools.combinations(factors, 2)
        for pair in itertools.product(_values(factors, one), _values(factors, other))
        if valid(dict(pair))
    }
    chosen: list[Combination] = []
    while open_pairs:
        first = min(open_pairs)
        tried = [_random(factors, valid, rng, dict(first)) for _ in range(40)]
        complete = [each for each in tried if each is not None]
        if not complete:
            open_pairs.discard(first)  # they may meet, but not in any whole combination
            continue
        best = max(complete, key=lambda each: len(open_pairs & set(_pairs(each))))
        open_pairs.difference_update(_pairs(best))
        chosen.append(best)
    return chosen


def _values(factors: Mapping[str, Sequence[str]], name: str) -> list[tuple[str, str]]:
    return [(name, value) for value in factors[name]]


def _pairs(combination: Combination) -> list[Pair]:
    """In the order of `factors`."""
    return list(itertools.combinations(combination.items(), 2))


def _random(
    factors: Mapping[str, Sequence[str]],
    valid: Callable[[Combination], bool],
    rng: random.Random,
    fixed: Combination,
) -> Combination | None:
    combination = dict(fixed)
    for name in rng.sample(list(factors), len(factors)):
        if name in combination:
            continue
        values = [value for value in factors[name] if valid({**combination, name: value})]
        if not values:
            return None
        combination[name] = rng.choice(values)
    return {name: combination[name] for name in factors}


Options = Mapping[str, Mapping[str, dict[str, Any]]]


def config_of(options: Options, combination: Combination) -> dict[str, Any]:
    """LoraConfig's fields. Lists of the same field are joined: targets, above all."""
    fields: dict[str, Any] = {}
    for name, value in combination.items():
        for field, content in options[name][value].items():
            known = fields.get(field)
            both = isinstance(known, list) and isinstance(content, list)
            fields[field] = [*known, *content] if both else content
    return fields
