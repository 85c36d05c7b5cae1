"""The line and its parking lots."""

from __future__ import annotations

import pytest

from tests.engine.harness import adapter
from worker.engine.sequence import Sequence
from worker.engine.waiting_queue import WaitingQueue
from worker.protocol.types import AdapterRef, RequestId, SamplingParams


def sequence(arrival: int, priority: int = 0, ref: AdapterRef | None = None) -> Sequence:
    sampling = SamplingParams(max_tokens=1)
    return Sequence(
        RequestId(str(arrival)), 0, (1,), sampling, arrival, priority=priority, adapter=ref
    )


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while (head := queue.head()) is not None:
        order.append(head.arrival)
        queue.remove(head)
    return order


def test_class_is_a_head_start() -> None:
    queue = WaitingQueue(headstart=3)
    for arrival, priority in ((0, 1), (1, 0), (2, 0), (3, 0), (4, 0)):
        queue.add(sequence(arrival, priority))
    assert drain(queue) == [1, 2, 0, 3, 4]


def test_the_parked_are_passed_over_and_come_back_to_their_place() -> None:
    queue = WaitingQueue(headstart=0)
    members = [sequence(arrival) for arrival in range(4)]
    for member in members:
        queue.add(member)
    queue.park(members[0], "reason")
    queue.park(members[1], "reason")
    assert queue.head() is members[2]
    assert queue.parked("reason") == (members[0], members[1])
    assert queue.reason(members[0]) == "reason"
    queue.remove(members[1])
    queue.unpark("reason")
    queue.unpark("reason")
    assert queue.reason(members[0]) is None
    assert drain(queue) == [0, 2, 3]


def test_a_preempted_sequence_gets_its_old_place() -> None:
    queue = WaitingQueue(headstart=0)
    first, second = sequence(0), sequence(1)
    for member in (first, second):
        queue.add(member)
    queue.remove(first)
    queue.add(first)
    assert drain(queue) == [0, 1]


def test_it_knows_which_adapters_are_waited_for() -> None:
    queue = WaitingQueue(headstart=0)
    one, two = sequence(0, ref=adapter("a")), sequence(1, ref=adapter("a"))
    for member in (one, two, sequence(2)):
        queue.add(member)
    queue.park(one, adapter("a"))
    assert queue.adapters() == (adapter("a"),)
    queue.remove(two)
    assert queue.wants(adapter("a"))
    queue.remove(one)
    assert not queue.wants(adapter("a"))
    assert len(queue) == 1
    with pytest.raises(KeyError):
        queue.remove(one)
