"""The scheduler's link to the node daemon: what is asked, and what is owed.

Runs in vLLM's engine core, in the scheduler's thread; used by `kvoffload_engine.manager` alone. It knows sessions and
leases, but neither requests nor vLLM.

    session   None -> open -> EngineReady (a row) -> bound (a namespace of keys). EngineLost, and a paused pool's Drain,
              last until EngineReady comes again, maybe with another row. An ended session takes its answers and
              unused slots with it; what workers may still read or write is told to the next one, in the connector's
              thread (`kvoffload_engine.reassertion`)
    slots     asked for ahead of need, so that a store finds them here (`kvoffload_engine.credits`)
    waiting   as long as the step's budget lasts (`kvoffload_engine.budget`)
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvoffload.errors import DaemonUnavailable, ProtocolError
from kvoffload.protocol.client import Connector, Session
from kvoffload.protocol.messages import (
    MAX_KEYS,
    OFFSET_BYTES,
    Assign,
    Bind,
    Bound,
    Drain,
    EngineLost,
    EngineReady,
    Fail,
    Found,
    FromDaemon,
    Generation,
    Hello,
    Lookup,
    Message,
    Refused,
    Report,
    Reserve,
    Reserved,
    Unpin,
    split_offsets,
)
from kvoffload_engine.budget import StepBudget
from kvoffload_engine.credits import Credits
from kvoffload_engine.log import logger
from kvoffload_engine.offsets import pack, unpack
from kvoffload_engine.reassertion import Held, Holdings, Reassertion
from kvoffload_engine.slots import SlotRow

REPORT_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Answer:
    """The answer to one look-up, on its way until `is_complete`."""

    keys: Sequence[bytes]
    session: Session
    row: SlotRow
    """That of the slots it leases; the engine's may be another one by now."""
    is_complete: bool = False
    is_abandoned: bool = False
    """Nobody waits for it any more: its leases go back when it comes."""
    hits: set[bytes] = field(default_factory=set)
    offsets: dict[bytes, int] = field(default_factory=dict)
    """Leased slots of the hits that were neither taken nor given back."""


class DaemonLink:
    """See the module's docstring."""

    def __init__(self, *, step_seconds: float, holdings: Holdings) -> None:
        self._connector: Connector | None = None
        self._none_hash: Callable[[], bytes] = bytes
        self._num_ranks = 0
        # of the session
        self.session: Session | None = None
        self.row: SlotRow | None = None
        self.is_draining = False
        self._is_bound = False
        self._credits = Credits()
        self._owed: dict[int, Answer | None] = {}
        self._next_number = 1
        self._unpins: list[bytes] = []
        # of the engine
        self.is_private = False
        self._unconfirmed_generation = 0
        """Number of the first request after a Generation that the daemon may not have heard, 0 if it has: it is said
        again to the next session. Nothing can be stored in between, as slots were given back before it."""
        self._budget = StepBudget(step_seconds)
        self._next_report = 0.0
        self._reassertion = Reassertion(holdings)

    def connect(
        self, socket_path: str, *, make_hello: Callable[[], Hello], none_hash: Callable[[], bytes], chunks_per_step: int
    ) -> None:
        """Begin to talk with the daemon, in the background."""
        self._none_hash = none_hash
        self._num_ranks = make_hello().world_size
        self._credits.want_for(chunks_per_step)
        self._connector = Connector(
            socket_path,
            make_hello=make_hello,
            on_connected=self._reassertion.begin,
            on_event=lambda line: logger.info("kvoffload scheduler: %s", line),
        )
        self._connector.start()

    def close(self) -> None:
        """End the session: the daemon takes back all that this process held."""
        self._report(force=True)
        if self._connector is not None:
            self._connector.close()
        self._reassertion.close()

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> Session | None:
        """The session, where it may be asked for something new."""
        if self.session is None or self.row is None or self.is_draining or self._circuit_is_open():
            return None
        return self.session

    def look_up(self, keys: Sequence[bytes], namespace: int) -> Answer | None:
        """Ask for these keys, and wait as long as the step may. None: everything is a miss."""
        session, row = self.serving, self.row
        if session is None or row is None:
            return None
        if not self._is_bound:
            self._is_bound = True  # a refusal comes as Refused and takes the row away
            self._send(session, Bind(self._none_hash(), len(keys[0]), self.is_private))
        answer = Answer(keys[:MAX_KEYS], session, row)
        if not self._send(session, Lookup(self._number(answer), b"".join(answer.keys), namespace)):
            return None
        self.wait_for(answer)
        return answer

    def wait_for(self, answer: Answer) -> None:
        """Wait for it as long as the step may; not at all while the circuit is open."""
        if not self._circuit_is_open():
            self._wait_until(lambda: answer.is_complete)

    def abandon(self, answer: Answer) -> None:
        """Give back what the answer leased, now or when it comes."""
        answer.is_abandoned = True
        if answer.offsets and answer.session is self.session:
            self._unpins.append(pack(answer.offsets.values()))
        answer.offsets = {}

    def unpin(self, held: Held) -> None:
        """Give leases back, where the present session has them."""
        if self._is_leased(held):
            self._unpins.append(held.offsets)

    def flush(self) -> None:
        """Send the leases that went back since the last flush."""
        if self._unpins and self.session is not None:
            self._send(self.session, *(Unpin(piece) for piece in split_offsets(b"".join(self._unpins))))
        self._unpins.clear()

    def wait_for_slots(self, count: int) -> bool:
        """Whether all that come are here: False while a Reserve is unanswered and fewer than `count` are here."""
        if len(self._credits) >= count or self.serving is None:
            return True
        self.reserve()
        self._wait_until(lambda: len(self._credits) >= count or not self._credits.is_awaited)
        return len(self._credits) >= count or not self._credits.is_awaited

    def assign(self, keys: Sequence[bytes], namespace: int) -> tuple[bytes, int]:
        """Give slots to as many of these keys as there are slots, the first ones first: packed offsets, and the
        epoch."""
        session = self.serving
        if session is None or not self._is_bound:
            return b"", 0
        packed = self._credits.spend(len(keys))
        if packed:
            chosen = keys[: len(packed) // OFFSET_BYTES]
            if not self._send(session, Assign(session.welcome.epoch, packed, b"".join(chosen), namespace)):
                return b"", 0  # the session has ended, and the slots with it
        self.reserve()
        return packed, session.welcome.epoch

    def reserve(self) -> None:
        """Ask for slots ahead of need, when less than half of them are left."""
        session = self.serving
        if session is None or self.row is None:
            return
        missing = self._credits.missing(session.welcome.region_bytes // self.row.slot_bytes)
        if missing:
            number = self._number(None)
            self._credits.asked(number)
            self._send(session, Reserve(number, missing))

    def drop(self, held: Held) -> None:
        """The bytes of these leased slots are wrong: nobody may hit them again."""
        if self.session is not None and self._is_leased(held):
            self._send(self.session, Fail(self.session.welcome.epoch, held.offsets, drop=True))

    def begin_generation(self) -> None:
        """What was stored before is not hit any more. Unused slots go back: a store to them would count as before
        it."""
        session = self.poll()
        if session is None:
            self._unconfirmed_generation = self._next_number
            return
        self._give_back_slots(session)
        self._send_generation(session)
        self.reserve()

    def _send_generation(self, session: Session) -> None:
        self._unconfirmed_generation = self._next_number
        self._send(session, Generation(private=self.is_private))

    def _give_back_slots(self, session: Session) -> None:
        unused = self._credits.give_back()
        if unused:
            self._send(session, Fail(session.welcome.epoch, unused))

    def end_step(self) -> None:
        """The scheduler's step is over: the next one may wait again."""
        self._budget.end_step()
        self._report()

    # --- receiving --------------------------------------------------------------------------------------------------

    def poll(self, timeout_seconds: float = 0.0) -> Session | None:
        """The present session, after taking in what has come."""
        session = self._connector.current() if self._connector is not None else None
        if session is not self.session:
            self._begin_session(session)
        if session is None:
            return None
        try:
            for message in session.receive(timeout_seconds):
                self._take(session, message)
        except ProtocolError as error:
            session.close(str(error))
            self._begin_session(None)
            return None
        except DaemonUnavailable:
            self._begin_session(None)
            return None
        return session

    def _begin_session(self, session: Session | None) -> None:
        self.session = session
        self.row = None
        self.is_draining = self._is_bound = False
        self._credits.begin_session()
        for answer in self._owed.values():
            if answer is not None:
                answer.is_complete = True  # with no hit
        self._owed.clear()
        self._unpins = []
        self._budget.close_circuit()
        if session is None:
            return
        if self._unconfirmed_generation:
            self._send_generation(session)
        self._unpins = [held.offsets for held in self._reassertion.ended_meanwhile()]

    def _take(self, session: Session, message: FromDaemon) -> None:
        if isinstance(message, (Found, Reserved)) and message.request >= self._unconfirmed_generation:
            self._unconfirmed_generation = 0
        if isinstance(message, Found):
            self._take_found(message)
        elif isinstance(message, Reserved):
            self._owed.pop(message.request, None)
            if not self._credits.take_answer(message) and message.offsets:  # of before a reset
                self._send(session, Fail(message.epoch, message.offsets))
        elif isinstance(message, EngineReady):
            self._take_ready(session, message)
        elif isinstance(message, EngineLost):
            self.row = None
            logger.info("kvoffload scheduler: offload pauses: %s", message.message)
        elif isinstance(message, Bound):
            logger.info("kvoffload scheduler: the region has %d chunks for this model", message.num_ready)
        elif isinstance(message, Drain):
            self.is_draining = True
            logger.info("kvoffload scheduler: the node daemon stops: %s", message.message)
        elif isinstance(message, Refused):
            self.row = None
            logger.warning("kvoffload scheduler: the node daemon refused: %s: %s", message.reason, message.message)

    def _take_ready(self, session: Session, message: EngineReady) -> None:
        row = SlotRow(message.slot_bytes, message.part_offsets, message.sharers, message.sharer_index)
        if not len(row.part_offsets) == len(row.sharers) == len(row.sharer_index) == self._num_ranks:
            raise ProtocolError(f"the daemon sent a row of {len(row.part_offsets)} parts to {self._num_ranks} ranks")
        self.row, self._is_bound = row, False
        self.is_draining = False  # a paused pool is active again
        self._give_back_slots(session)  # they have the length of the row before
        self.reserve()
        logger.info(
            "kvoffload scheduler: offload is on: %s, %d bytes a slot%s",
            "one copy for all ranks" if message.replicated else "a part for each rank",
            message.slot_bytes,
            f" ({message.reason})" if message.reason else "",
        )

    def _take_found(self, message: Found) -> None:
        answer = self._owed.get(message.request)
        if answer is None:
            return
        offsets = unpack(message.offsets)
        if offsets.size != len(answer.keys):
            raise ProtocolError(f"the daemon answered {len(answer.keys)} keys with {offsets.size} offsets")
        del self._owed[message.request]
        found = zip(answer.keys, offsets.tolist(), strict=True)
        answer.offsets = dict(found) if np.all(offsets >= 0) else {k: offset for k, offset in found if offset >= 0}
        answer.hits = set(answer.offsets)
        answer.is_complete = True
        if answer.is_abandoned:
            self.abandon(answer)

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        self._budget.wait_until(is_done, lambda seconds: self.poll(seconds) is not None)

    def _is_leased(self, held: Held) -> bool:
        return self.session is not None and self._reassertion.is_leased_by(self.session, held)

    def _circuit_is_open(self) -> bool:
        return self._budget.circuit_is_open(is_owed=bool(self._owed))

    # --- sending ----------------------------------------------------------------------------------------------------

    def _number(self, answer: Answer | None) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        self._owed[number] = answer
        return number

    def _send(self, session: Session, *messages: Message) -> bool:
        try:
            session.send(*messages)
        except DaemonUnavailable:
            return False  # the next poll sees the session closed
        return True

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not self._budget.num_steps or (now < self._next_report and not force):
            return
        self._next_report = now + REPORT_SECONDS
        report = Report(missed_deadlines=self._budget.num_missed, steps=self._budget.num_steps)
        if self.session is not None and self._send(self.session, report):
            self._budget.forget_counts()
