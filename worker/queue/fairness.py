"""Virtual token counters of the tenants of one class (VTC, arXiv 2401.00588).

The same rules as `scripts/counters.lua`, for the in-process queue.
"""

from __future__ import annotations

import heapq

from worker.protocol.types import TenantId


class TokenCounters:
    """Who waits, who runs, and how many tokens each was charged so far, over its weight.

    A tenant in neither set is remembered while its counter is above the floor: coming back
    neither forgives past use nor earns credit for idling.
    """

    def __init__(self) -> None:
        self._counters: dict[TenantId, float] = {}
        self._waiting: set[TenantId] = set()
        self._held: dict[TenantId, int] = {}
        self._last_left = 0.0

    def waiting(self) -> dict[TenantId, float]:
        return {tenant: self._counters[tenant] for tenant in self._waiting}

    def lowest(self, count: int) -> list[TenantId]:
        """The waiting tenants to serve next."""
        return heapq.nsmallest(
            count, self._waiting, key=lambda tenant: (self._counters[tenant], tenant)
        )

    def wait(self, tenant: TenantId) -> None:
        """The tenant has ready requests."""
        if tenant in self._waiting:
            return
        floor = self._floor()
        self._counters[tenant] = max(self._counters.get(tenant, floor), floor)
        self._waiting.add(tenant)

    def stop_waiting(self, tenant: TenantId) -> None:
        self._waiting.discard(tenant)
        self._leave(tenant)

    def hold(self, tenant: TenantId, tokens: float) -> None:
        """One more lease, charged `tokens`."""
        self._held[tenant] = self._held.get(tenant, 0) + 1
        self._counters[tenant] += tokens

    def charge(self, tenant: TenantId, tokens: float) -> None:
        self._counters[tenant] += tokens

    def let_go(self, tenant: TenantId, correction: float) -> None:
        """One lease less; minus its charge refunds it."""
        self._counters[tenant] += correction
        self._held[tenant] -= 1
        if self._held[tenant] == 0:
            del self._held[tenant]
            self._leave(tenant)

    def rebase(self, limit: float) -> None:
        """Doubles count exactly only so far: move all counters back by the lowest."""
        floor = self._floor()
        if floor <= limit:
            return
        self._counters = {tenant: value - floor for tenant, value in self._counters.items()}
        self._last_left = 0.0

    def _floor(self) -> float:
        present = self._waiting or self._held
        return min((self._counters[tenant] for tenant in present), default=self._last_left)

    def _leave(self, tenant: TenantId) -> None:
        if tenant in self._waiting or tenant in self._held:
            return
        if not self._waiting and not self._held:
            self._last_left = self._counters[tenant]
        floor = self._floor()
        self._counters = {
            one: value
            for one, value in self._counters.items()
            if value > floor or one in self._waiting or one in self._held
        }
