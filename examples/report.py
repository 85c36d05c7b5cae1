"""What is printed: answers side by side, accuracy, tokens, speed and the bill; and errors."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from runs import Run

SAMPLES = 2
WIDTH = 58


def print_report(
    console: Console, runs: list[Run], bills: list[dict[str, Any]], elapsed: float
) -> None:
    """`elapsed` is seconds from the first submission to the last batch's end."""
    for adapter_run, base_run in zip(runs[::2], runs[1::2], strict=True):
        print_samples(console, adapter_run, base_run)
    print_totals(console, runs, bills)
    completion = sum(run.batch.usage.output_tokens for run in runs)
    prompt = sum(run.batch.usage.input_tokens for run in runs)
    lines = sum(len(run.examples) for run in runs)
    console.print(
        f"{lines} lines in {elapsed:.1f} s: {completion / elapsed:.0f} completion tokens/s, "
        f"{(prompt + completion) / elapsed:.0f} tokens/s in all"
    )


def print_samples(console: Console, adapter_run: Run, base_run: Run) -> None:
    customer = adapter_run.customer
    table = Table(title=f"{customer.tenant}: {customer.adapter}", title_justify="left", expand=True)
    for heading in ("input", f"adapter {adapter_run.model}", "base model"):
        table.add_column(heading, ratio=1, overflow="fold")
    answers = zip(adapter_run.examples, adapter_run.texts or [], base_run.texts or [], strict=True)
    for example, adapted, base in list(answers)[:SAMPLES]:
        table.add_row(*(Text(clip(text)) for text in (example.user, adapted, base)))
        table.add_section()
    console.print(table)


def clip(text: str, limit: int = 3 * WIDTH) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def print_totals(console: Console, runs: list[Run], bills: list[dict[str, Any]]) -> None:
    # Without its outer edges the table fits into eighty columns.
    title = "held-out accuracy, tokens and the bill"
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for heading in ("tenant", "model"):
        table.add_column(heading, no_wrap=True)
    for heading in ("right", "prompt", "cached", "output", "out/s", "bill"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run, bill in zip(runs, bills, strict=True):
        usage = run.batch.usage
        table.add_row(
            run.customer.tenant,
            "base" if run.is_base else run.model,
            f"{run.correct}/{len(run.examples)}",
            str(usage.input_tokens),
            str(usage.input_tokens_details.cached_tokens),
            str(usage.output_tokens),
            f"{usage.output_tokens / seconds(run):.0f}",
            dollars(bill["amount_nano"]),
        )
    console.print(table)


def seconds(run: Run) -> float:
    """From the start of the batch to its end, as the API tells it: whole seconds."""
    return max(1.0, run.batch.completed_at - run.batch.in_progress_at)


def dollars(nano: int) -> str:
    return f"${nano / 1e9:.6f}"


def print_error(console: Console, error: Exception) -> None:
    """As it is: not wrapped, and brackets in it are no markup."""
    console.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
