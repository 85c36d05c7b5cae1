"""Compute threads spin where there is room for it, and only one thread keeps a team."""

import subprocess
import sys

import pytest

from worker.engine.compute_threads import SPINS, in_passing, wait_politely

TEAMS = """
import os, time
import torch
from worker.engine.compute_threads import in_passing

def multiply():
    return torch.ones(512, 512) @ torch.ones(512, 512)

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = threads()
in_passing(multiply)
time.sleep(0.2)  # the runtime ends them without waiting
print(threads() - before)
multiply()
print(threads() - before)
"""

INTERRUPTED = """
import signal, threading
from worker.engine.compute_threads import in_passing

signal.signal(signal.SIGINT, signal.default_int_handler)

def hang():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    threading.Event().wait()

try:
    in_passing(hang)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("threads", "cores", "spins"), [(2, 4, SPINS), (4, 4, 0), (8, 4, 0)])
def test_threads_spin_where_they_leave_a_core_free(threads, cores, spins):
    environ = {}
    wait_politely(threads, cores, environ)
    assert environ == {"GOMP_SPINCOUNT": str(spins)}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_operator_has_set_stays(name):
    environ = {name: "own"}
    wait_politely(1, 4, environ)
    assert environ == {name: "own"}


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_what_computes_in_passing_leaves_no_team():
    done = subprocess.run(
        [sys.executable, "-c", TEAMS], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.split() == ["0", "2"], done.stderr


def test_what_computes_in_passing_gives_its_result_or_raises():
    assert in_passing(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        in_passing(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        in_passing(sys.exit)


def test_an_interrupt_does_not_wait_for_what_computes_in_passing():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
