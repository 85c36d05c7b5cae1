"""Serve the demo model, its adapters and tenants until Ctrl-C, and print their keys.

    python examples/serve.py [--model FOLDER] [--data DIR] [--port PORT]

Tenants, keys and everything that ran are kept in the data directory, which the demo shares.
"""

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import httpx
from customers import Customer, OnboardingError, onboard
from report import print_error
from rich.console import Console
from stack import Stack, StackError, running_stack, tail

ROOT = Path(__file__).parent.parent
CHECK_SECONDS = 2.0
SILENT_SECONDS = 60.0


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(0))  # nobody is there to read anything
    try:
        serve(options, console)
    except (StackError, OnboardingError, httpx.HTTPError) as error:
        print_error(console, error)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    model = os.environ.get("BATTEN_MODEL") or ROOT / ".cache" / "smollm2-135m-instruct"
    parser.add_argument("--model", type=Path, default=Path(model))
    parser.add_argument("--data", type=Path, default=ROOT / ".demo")
    parser.add_argument("--port", type=int, default=8400)
    return parser.parse_args(argv)


def serve(options: argparse.Namespace, console: Console) -> None:
    console.print("starting redis, api, collector, control and a worker …")
    model = options.model.resolve()
    with running_stack(model, model.name, options.data, options.port) as stack:
        introduce(console, stack, model.name, onboard(stack))
        watch(stack)


def introduce(console: Console, stack: Stack, model_name: str, customers: list[Customer]) -> None:
    def show(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    show(f"[bold green]ready[/] on {stack.url}/v1, base model {model_name}; Ctrl-C stops it")
    show(f"  operator            {stack.admin_key}")
    for customer in customers:
        show(f"  {customer.tenant:<19} {customer.key}  (model: {customer.adapter})")
    show(f"\ntry: {example(stack, customers[0])}")


def example(stack: Stack, customer: Customer) -> str:
    """A command for the shell: a ticket with the instructions that the adapter was trained on."""
    ticket = "My Nimbus Kettle arrived broken, order 48213."
    body = {
        "model": customer.adapter,
        "messages": customer.task.messages(ticket),
        "max_tokens": customer.task.MAX_TOKENS,
        "temperature": 0,
    }
    words = [f"{stack.url}/v1/chat/completions", "-H", f"Authorization: Bearer {customer.key}"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return shlex.join(["curl", *words])


def watch(stack: Stack) -> None:
    """Until Ctrl-C. Raises StackError when nothing has answered for a while."""
    heard = time.monotonic()
    while True:
        time.sleep(CHECK_SECONDS)
        try:
            httpx.get(f"{stack.url}/healthz", timeout=CHECK_SECONDS)
            heard = time.monotonic()
        except httpx.TransportError:
            if time.monotonic() - heard > SILENT_SECONDS:
                raise StackError(f"the API went away:\n{tail(stack.data / 'up.log')}") from None


if __name__ == "__main__":
    sys.exit(main())
