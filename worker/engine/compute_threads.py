"""How the threads that compute share the cores.

Importing this does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

SPINS = 3000
"""Of the runtime's loop, some 30 microseconds: what lies between most of a step's products."""


def wait_politely(threads: int, cores: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """How idle ones of `threads` compute threads wait on `cores` cores. Call before torch is
    imported.

    A step has hundreds of products that take as long as it takes to wake a thread, so they spin
    shortly before they sleep; but only where they leave a core to the rest of the stack. Elsewhere
    a thread that spins keeps its core from the very thread it waits for. What the operator has
    set stays.
    """
    if not environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        environ["GOMP_SPINCOUNT"] = str(SPINS if threads < cores else 0)


def in_passing(function: Callable[[], T]) -> T:
    """`function()`, in a thread that ends with it.

    Every thread that computes gets a team of compute threads, as large as the engine's, which
    lives as long as the thread does. Where that makes more threads than cores, GNU's OpenMP
    runtime lets no thread of the process spin any more. So whatever computes beside the engine
    does so in passing. Raises what `function` raises, and RuntimeError where there can be no more
    threads. An interrupt doesn't wait for `function`, nor does the process's end after it.
    """
    outcome: Future[T] = Future()
    thread = Thread(target=_settle, args=(outcome, function), daemon=True)
    thread.start()
    try:
        return outcome.result()
    finally:
        if outcome.done():
            thread.join()


def _settle(outcome: Future[T], function: Callable[[], T]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:  # the thread's edge: it is raised where the result is awaited
        outcome.set_exception(error)
