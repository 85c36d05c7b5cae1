"""Random numbers that are a function of what they are for, not of when they are drawn."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), with 53 random bits, for one token of one choice.

    Chained splitmix64 finalisers (Steele, Lea and Flood 2014): each input is mixed in whole, so
    that neighbouring seeds, choices and positions share nothing.
    """
    state = _mix(seed & _MASK)
    state = _mix(state ^ (choice & _MASK))
    state = _mix(state ^ (position & _MASK))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
