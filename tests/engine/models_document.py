"""The table of architectures in docs/models.md: `python -m tests.engine.models_document`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.engine.architectures import REFUSED, SERVED

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def table() -> str:
    """Markdown: what is served, then what is refused."""
    served = [(f"`{each.model_type}`", each.variant, each.features) for each in SERVED]
    refused = [(f"`{each.model_type}`", each.variant, each.why) for each in REFUSED]
    return "\n".join(
        [
            *_rows(("model_type", "variant", "what is special about it"), served),
            "",
            "Refused by name at start:",
            "",
            *_rows(("model_type", "variant", "why"), refused),
        ]
    )


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def split_document() -> tuple[str, str, str]:
    """(before, table, after) of the document."""
    before, _, rest = DOCUMENT.read_text().partition(f"{BEGIN}\n")
    shown, _, after = rest.partition(f"\n{END}")
    return before, shown, after


if __name__ == "__main__":
    before, _, after = split_document()
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")
