"""Weighted fairness between tenants: who was served least goes first.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's counter grows by the tokens
computed for it, divided by its weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Tenant:
    """``served``: tokens computed for it / ``weight``. ``n_live``: its sessions that are not finished."""

    name: str
    weight: float
    served: float = 0.0
    n_live: int = 0

    def charge(self, n_tokens: int) -> None:
        self.served += n_tokens / self.weight


class Tenants:
    """The counters that matter: of tenants with live sessions, and of idle ones that are ahead of the least served active one."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._tenants: dict[str, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def find(self, name: str) -> Tenant:
        """The tenant of a new session; the roster counts its live ones.

        A tenant that comes back from idle starts at the least counter of the active ones: idle time is no credit. When its own is
        higher it keeps that one: a pause pays no debt. Debts end when nobody is active.
        """
        floor = min((t.served for t in self._tenants.values() if t.n_live), default=None)
        self._forget_idle(floor)
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = Tenant(name, self._weights.get(name, 1.0), floor or 0.0)
            self._tenants[name] = tenant
        return tenant

    def _forget_idle(self, floor: float | None) -> None:
        """Drop idle tenants that would start at ``floor`` anyway, so that names seen once cost no memory."""
        for t in list(self._tenants.values()):
            if t.n_live == 0 and (floor is None or t.served <= floor):
                del self._tenants[t.name]
