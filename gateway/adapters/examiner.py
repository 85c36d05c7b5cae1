"""Runs the check of a stranger's files in a process of its own, with an end.

Patterns in a PEFT config are regular expressions, which may take for ever to match, and no
thread can be stopped. A check that is too slow or crashes is a rejection, not a loop.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from gateway.adapters.checking import CheckedAdapter, PromptBase, check
from gateway.kit.json import storable
from worker.protocol.peft import Problem

MODULE = "gateway.adapters.examiner"
BASE_SECONDS = 30.0
BYTES_PER_SECOND = 20 * 2**20

_log = structlog.get_logger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


class CheckInterrupted(Exception):
    """The process was told to end, as at a shutdown: check again later."""


class Order(msgspec.Struct, frozen=True):
    folder: str
    shapes: dict[str, tuple[int, ...]]
    most_rank: int | None
    most_bytes: int
    cpu_seconds: int
    prompts: PromptBase | None = None


class Report(msgspec.Struct, frozen=True):
    """Either `checked` or at least one problem."""

    problems: list[Problem]
    checked: CheckedAdapter | None = None


async def examine(
    folder: Path,
    shapes: Shapes,
    most_rank: int | None,
    most_bytes: int,
    prompts: PromptBase | None = None,
    base_seconds: float = BASE_SECONDS,
) -> CheckedAdapter | list[Problem]:
    """Raises CheckInterrupted."""
    seconds = base_seconds + await asyncio.to_thread(_size, folder) / BYTES_PER_SECOND
    order = Order(str(folder), dict(shapes), most_rank, most_bytes, int(seconds) + 1, prompts)
    try:
        code, output, errors = await _run(msgspec.json.encode(order), seconds)
    except TimeoutError:
        return [Problem("adapter_check_timeout", "adapter", f"took longer than {seconds:.0f} s")]
    if code in (-signal.SIGTERM, -signal.SIGINT):
        raise CheckInterrupted
    if code != 0:
        _log.error("adapter_check_failed", code=code, stderr=errors.decode(errors="replace"))
        return [Problem("adapter_check_failed", "adapter", "the files could not be checked")]
    report = msgspec.json.decode(output, type=Report)
    return report.checked or report.problems


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


async def _run(order: bytes, seconds: float) -> tuple[int, bytes, bytes]:
    """Exit code, output and errors of the checking process. Raises TimeoutError."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULE, stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(order), seconds)
    finally:
        if process.returncode is None:
            process.kill()
        code = await process.wait()
    return code, output, errors


def main() -> None:
    """The order on standard input, the report on standard output. The limit on processor time
    ends the process even when nobody waits for it any more."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    resource.setrlimit(resource.RLIMIT_CPU, (order.cpu_seconds, order.cpu_seconds))
    outcome = check(
        Path(order.folder), order.shapes, order.most_rank, order.most_bytes, order.prompts
    )
    report = Report([], outcome) if isinstance(outcome, CheckedAdapter) else Report(outcome)
    sys.stdout.buffer.write(msgspec.json.encode(storable(msgspec.to_builtins(report))))


if __name__ == "__main__":
    main()
