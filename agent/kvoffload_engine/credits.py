"""Slots that the node daemon gave to this engine ahead of need, so that a store finds them here: its credits.

Runs in vLLM's engine core, in the scheduler's thread; owned by `kvoffload_engine.link`, which sends and receives. It
knows which slots are here and how many more are worth asking for; neither keys nor epochs.

    Reserve (at most one unanswered) -> Reserved -> taken by an Assign, or given back by a Fail
    A session begins with none: credits end with the connection.
"""

from collections import deque

from kvoffload.errors import Shortage
from kvoffload.protocol.messages import MAX_KEYS, Reserved
from kvoffload_engine.log import logger
from kvoffload_engine.offsets import pack, unpack

REGION_SHARE = 8
"""At most one slot in so many of the region is held unused by one engine, and always one."""
SAID_REASONS = {
    Shortage.QUOTA_LIMIT.value: "the Kubernetes namespace is at its limit in the pool's quotas, and all that it "
    "stored is in use; raise the limit",
    Shortage.STATE_FULL.value: "the node daemon's state folder does not take the records of more slots; the "
    "region's condition Degraded says why",
}
"""Why fewer slots come than were asked for, where a person can do something about it; said once a session. The daemon
counts all reasons (`kvoffload_short_reservations_total`)."""


class Credits:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.wanted = 512
        """How many are worth having, in a region that is large enough."""
        self._slots: deque[int] = deque()
        self._request = 0
        """Number of the Reserve that has no answer yet, 0 if there is none."""
        self._said: set[str] = set()

    def __len__(self) -> int:
        """How many slots are here."""
        return len(self._slots)

    @property
    def is_awaited(self) -> bool:
        """Whether a Reserve is unanswered."""
        return bool(self._request)

    def want_for(self, chunks_per_step: int) -> None:
        """An engine of so many chunks in a step: two steps' worth."""
        self.wanted = min(MAX_KEYS, 2 * max(1, chunks_per_step))

    def begin_session(self) -> None:
        """Another session, or none."""
        self._slots.clear()
        self._said.clear()
        self._request = 0

    def missing(self, slots_of_region: int) -> int:
        """How many to ask for now: none while a Reserve is unanswered, or while more than half of them are here."""
        target = min(self.wanted, max(1, slots_of_region // REGION_SHARE))
        missing = target - len(self._slots)
        return missing if not self._request and 2 * missing >= target else 0

    def asked(self, request: int) -> None:
        """A Reserve of this number was sent."""
        self._request = request

    def take_answer(self, message: Reserved) -> bool:
        """Whether these slots are credits now; those of a Reserve of before `give_back` are not. Raises
        ProtocolError."""
        self._say_short(message.reason)
        if message.request != self._request:
            return False
        self._request = 0
        self._slots.extend(unpack(message.offsets).tolist())
        return True

    def spend(self, count: int) -> bytes:
        """As many slots as there are, packed, and `count` at most."""
        return pack(self._slots.popleft() for _ in range(min(count, len(self._slots))))

    def give_back(self) -> bytes:
        """All slots, packed; what an unanswered Reserve brings is none of ours any more."""
        self._request = 0
        return self.spend(len(self._slots))

    def _say_short(self, reason: str) -> None:
        if reason in SAID_REASONS and reason not in self._said:
            self._said.add(reason)
            logger.warning("kvoffload scheduler: not everything is stored: %s: %s", reason, SAID_REASONS[reason])
