"""The effects around a supervisor: lock, checks, migrations, signals, and the summary."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from gateway.cli.ports import check_free
from gateway.cli.supervisor import redis_server
from gateway.cli.supervisor.console import Reporter
from gateway.cli.supervisor.data_lock import locked
from gateway.cli.supervisor.plan import UpPlan
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.cli.supervisor.bootstrap import Bootstrapped


def run_up(settings: Settings, *, workers: int, follow: bool, console: Console) -> None:
    """Raises CommandError before anything was started, or once everything has ended."""
    reporter = Reporter(console, follow)
    with locked(settings.data):
        check_free(settings.host, settings.port)
        from gateway.cli.supervisor.bootstrap import bootstrap  # takes a while, the checks do not

        found = bootstrap(settings, say=reporter.say)
        plan = _plan(settings, workers, found)
        asyncio.run(_supervise(plan, found, reporter, console))


async def _supervise(
    plan: UpPlan, found: Bootstrapped, reporter: Reporter, console: Console
) -> None:
    from gateway.cli.supervisor.supervisor import Supervisor

    supervisor = Supervisor(plan, reporter)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.stop)
    await supervisor.run(lambda: _print_summary(plan, found, console))
    reporter.say("stopped")


def _plan(settings: Settings, workers: int, found: Bootstrapped) -> UpPlan:
    plan = UpPlan(
        host=settings.host,
        port=settings.port,
        data=settings.data.absolute(),
        database_url=settings.effective_database_url,
        redis_url=settings.redis_url.get_secret_value() if settings.redis_url else "",
        redis_argv=None,
        store=settings.effective_store,
        model=settings.model,
        model_name=found.model_name,
        workers=workers,
        log_level=settings.log_level,
        admin_key=settings.admin_key.get_secret_value() if settings.admin_key else None,
    )
    if settings.redis_url is not None:
        return plan
    server = redis_server.prepare(plan.data)
    return replace(plan, redis_url=server.url, redis_argv=server.argv)


def _print_summary(plan: UpPlan, found: Bootstrapped, console: Console) -> None:
    rows = {
        "API": f"http://{plan.host}:{plan.port}/v1",
        "model": f"{found.model_name or 'none'}",
        "workers": str(plan.workers),
        "data": str(plan.data),
        "logs": str(plan.data / "logs"),
        "admin key": _admin_key(plan, found),
    }
    console.print("[bold green]Batten is ready[/bold green]")
    for name, value in rows.items():
        console.print(f"  {name:<10} {escape(value)}", soft_wrap=True, highlight=False)


def _admin_key(plan: UpPlan, found: Bootstrapped) -> str:
    if found.new_admin_key is not None:
        return f"{found.new_admin_key} (shown only now)"
    return "BATTEN_ADMIN_KEY" if plan.admin_key is not None else "as shown at the first start"
