"""Who gets the free places among deliveries on their way: a pure decision."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from gateway.settings import Settings
from gateway.webhooks.breaker import room
from gateway.webhooks.claims import DueEndpoint


@dataclass(frozen=True, slots=True)
class Busy:
    """Deliveries on their way, by endpoint and by tenant."""

    endpoints: Counter[str] = field(default_factory=Counter)
    tenants: Counter[str] = field(default_factory=Counter)


def shares(due: Sequence[DueEndpoint], busy: Busy, settings: Settings) -> dict[str, int]:
    """How many deliveries of each endpoint to claim. A place goes to the tenant, and of its
    endpoints to the one, with the fewest on their way, then to what came due first; none gets
    more than its most, a failing endpoint one."""
    queues: dict[str, list[tuple[int, int, str, int]]] = defaultdict(list)
    for endpoint in due:
        most = room(
            endpoint.failures, settings.webhook_failures, settings.webhook_endpoint_concurrency
        )
        if busy.endpoints[endpoint.id] < most:
            place = (busy.endpoints[endpoint.id], endpoint.due_at, endpoint.id, most)
            heappush(queues[endpoint.tenant_id], place)
    tenant_most = settings.webhook_tenant_concurrency
    turns = [
        (busy.tenants[tenant_id], queue[0][1], tenant_id)
        for tenant_id, queue in queues.items()
        if busy.tenants[tenant_id] < tenant_most
    ]
    heapify(turns)
    given: Counter[str] = Counter()
    for _ in range(settings.webhook_concurrency - busy.endpoints.total()):
        if not turns:
            break
        of_tenant, _, tenant_id = heappop(turns)
        queue = queues[tenant_id]
        of_endpoint, due_at, endpoint_id, most = heappop(queue)
        given[endpoint_id] += 1
        if of_endpoint + 1 < most:
            heappush(queue, (of_endpoint + 1, due_at, endpoint_id, most))
        if queue and of_tenant + 1 < tenant_most:
            heappush(turns, (of_tenant + 1, queue[0][1], tenant_id))
    return dict(given)
