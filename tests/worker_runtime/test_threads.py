"""Compute threads spin shortly unless the operator says otherwise."""

import pytest

from worker.runtime.threads import SPINS, wait_politely


def test_threads_spin_shortly():
    environ = {}
    wait_politely(environ)
    assert environ == {"GOMP_SPINCOUNT": str(SPINS)}


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_operator_has_set_stays(name):
    environ = {name: "own"}
    wait_politely(environ)
    assert environ == {name: "own"}
