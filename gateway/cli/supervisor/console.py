"""What the person in front of `batten up` sees: few lines, one per thing that happened."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

from gateway.cli.supervisor.plan import UpPlan
from gateway.cli.supervisor.process import ChildEnded


class Reporter:
    """`follow`: show every line that the children write."""

    def __init__(self, console: Console, follow: bool = False) -> None:
        self._console = console
        self._follow = follow

    def echo(self, name: str) -> Callable[[str], None] | None:
        if not self._follow:
            return None
        return lambda line: self._console.print(f"[dim]{name:>10}[/dim] {escape(line)}")

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}")

    def api_ready(self, plan: UpPlan) -> None:
        waiting = f"; waiting for {plan.workers} worker(s)" if plan.workers else ""
        self.say(f"API answers on http://{plan.host}:{plan.port}{waiting}")

    def child_ended(self, ended: ChildEnded) -> None:
        self.say(f"[red]{ended.name} {ended.how}[/red]; again in {ended.delay:g} s")
        for line in ended.tail[-2:]:
            self._console.print(f"    {escape(line)}", soft_wrap=True)

    def stopping(self) -> None:
        self.say("stopping (again to stop at once)")
