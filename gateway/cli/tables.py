from __future__ import annotations

from rich.console import Console
from rich.table import Table


def show(table: Table) -> None:
    """All of its text as it is: a name may look like markup, or the code of an emoji."""
    Console(markup=False, emoji=False).print(table)
