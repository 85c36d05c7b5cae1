"""The whole system on one machine: three tenants, three adapters, a batch each, and the bill.

    python examples/demo.py [--model FOLDER] [--data DIR] [--lines N] [--port PORT]

Each tenant sends one batch of held-out lines to its adapter and the same lines to the base model,
so that the two can be compared. Everything stops at the end, or on Ctrl-C.
"""

import argparse
import signal
import socket
import sys
import time
from pathlib import Path

from customers import OnboardingError, onboard
from httpx import HTTPError
from openai import OpenAIError
from report import print_error, print_report
from rich.console import Console
from runs import BatchError, bill, collect, follow, submit_all
from stack import StackError, running_stack

ROOT = Path(__file__).parent.parent


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    try:
        demo(options, console)
    except (StackError, OnboardingError, BatchError, OpenAIError, HTTPError) as error:
        print_error(console, error)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default_model = ROOT / ".cache" / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=default_model)
    parser.add_argument("--data", type=Path, default=ROOT / ".demo")
    parser.add_argument("--lines", type=int, default=40, help="lines of each batch")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    return parser.parse_args(argv)


def demo(options: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    port = options.port or free_port()
    console.print("starting redis, api, collector, control and a worker …")
    with running_stack(options.model, options.model.name, options.data, port) as stack:
        console.print(f"ready on {stack.url} after {time.monotonic() - began:.0f} s")
        customers = onboard(stack)
        for customer in customers:
            console.print(f"  tenant {customer.tenant}: adapter {customer.adapter} is ready")
        started = time.monotonic()
        runs = submit_all(stack, customers, options.model.name, options.lines)
        follow(runs, console)
        elapsed = time.monotonic() - started
        collect(runs)
        print_report(console, runs, [bill(stack, run) for run in runs], elapsed)
    took = time.monotonic() - began
    console.print(f"every process has stopped; the demo took {took:.0f} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
