"""Accounts: what the pods of one Kubernetes namespace have stored, and what its quota allows. Pure.

Runs in the node daemon; called by `tenant.py` before a slot is given out and by `eviction.py` before one is taken.
"""

from dataclasses import dataclass

UNLIMITED_BYTES = 1 << 62


@dataclass(slots=True, eq=False)
class Account:
    """Bytes of slots (being written or ready) stored by the pods of one Kubernetes namespace."""

    number: int
    namespace: str
    guaranteed_bytes: int = 0
    """Nobody else's stores take it below this."""
    limit_bytes: int = UNLIMITED_BYTES
    used_bytes: int = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether it may hold so many more."""
        return self.used_bytes + num_bytes <= self.limit_bytes

    def may_lose(self, num_bytes: int, *, to: "Account") -> bool:
        """Whether `to` may evict so many bytes of this account."""
        return self is to or self.used_bytes - num_bytes >= self.guaranteed_bytes
