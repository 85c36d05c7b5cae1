"""What the demo prints, in a terminal of eighty columns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from report import print_error, print_totals
from rich.console import Console


def test_the_totals_fit_into_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    usage = SimpleNamespace(
        input_tokens=123456,
        input_tokens_details=SimpleNamespace(cached_tokens=98765),
        output_tokens=54321,
    )
    run = SimpleNamespace(
        customer=SimpleNamespace(tenant="acme-catalog"),
        batch=SimpleNamespace(usage=usage, in_progress_at=10, completed_at=60),
        is_base=False,
        model="products",
        correct=38,
        examples=range(40),
    )
    print_totals(Console(width=80), [run], [{"amount_nano": 474995}])  # type: ignore[list-item]
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = [cell.strip() for cell in lines[-1].split("│")]
    assert cells == [
        "acme-catalog", "products", "38/40", "123456", "98765", "54321", "1086", "$0.000475"
    ]  # fmt: skip


def test_an_error_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "no worker [1] was ready " * 9
    print_error(Console(width=80), ValueError(text))
    assert capsys.readouterr().out == f"error: {text}\n"
