"""How much of a prompt is what the operator shares among tenants, by token ids alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from worker.protocol.types import SharedPrefix

Tokens = tuple[int, ...]


@dataclass(slots=True)
class SharedPrefixTable:
    """What was registered when it was last looked up: `version` and `read_at` (monotonic seconds)
    are the reader's. By base model, the longest first."""

    version: object = None
    read_at: float = float("-inf")
    _of_model: Mapping[str, Sequence[SharedPrefix]] = field(default_factory=dict)

    def replace(self, prefixes: Mapping[str, Sequence[SharedPrefix]]) -> None:
        self._of_model = {
            model: sorted(of, key=lambda each: (-len(each.token_ids), each.digest, each.token_ids))
            for model, of in prefixes.items()
        }

    def of(self, model: str) -> Sequence[SharedPrefix]:
        return self._of_model.get(model, ())

    def covered(self, model: str, digest: str, prompt: Tokens) -> int:
        """How many leading tokens of `prompt` some registered prefix begins with, too."""
        return max(
            (
                common(each.token_ids, prompt)
                for each in self._of_model.get(model, ())
                if each.digest == digest
            ),
            default=0,
        )


def common(one: Tokens, other: Tokens) -> int:
    """Tokens with which both begin, found by halving."""
    least, most = 0, min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


def by_model(rows: Sequence[tuple[str, SharedPrefix]]) -> Mapping[str, Sequence[SharedPrefix]]:
    found: dict[str, list[SharedPrefix]] = defaultdict(list)
    for model, prefix in rows:
        found[model].append(prefix)
    return found
