"""The scheduler's side: which chunks the region holds, and which slots new ones go to. Never blocks longer than its
budget.

Runs in vLLM's engine core, in the scheduler's thread; called by vLLM's offloading scheduler (the `OffloadingManager`
interface) and by our connector (`begin_request`, `begin_lookup`, `receives_finished`, `load_failed`, `end_step`).

    a request's life
      begin_request   its namespace: shared, or private to the engine (adapter, multimodal input)
      begin_lookup    one Lookup with all its keys; the answer leases every hit
      lookup (key)    from the answer; RETRY while it is on its way, twice and for 50 ms at least, then a miss
      prepare_load    takes leased offsets out of the answer -> RegionSlots for the workers
      on_schedule_end leases of the answer that no load took are given back
      receives_finished (all ranks): the load's leases are given back
      prepare_store   keys that are not there yet get reserved slots: Assign -> RegionSlots; each worker seals

    waiting   one budget for all waits of a step (2 ms), refilled by end_step. Two steps in a row that used
    it up
              open the circuit: nothing is asked and everything is a miss, until the daemon has answered what it owes.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from kvoffload.errors import DaemonUnavailable
from kvoffload.protocol.client import Connector, Session
from kvoffload.protocol.messages import (
    MAX_KEYS,
    MAX_RANKS,
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
    Reassert,
    Refused,
    Report,
    Reserve,
    Reserved,
    Unpin,
)
from kvoffload_engine.log import logger
from kvoffload_engine.slots import RegionSlots, SlotRow

DEADLINE_VARIABLE = "KVOFFLOAD_STEP_DEADLINE_SECONDS"
DEFAULT_STEP_SECONDS = 0.002
MAX_STEP_SECONDS = 1.0
QUIET_SECONDS = 10.0
"""How long the log keeps quiet about a circuit that opens again and again."""
MAX_RETRIES = 2
RETRY_SECONDS = 0.05
"""A request is deferred at least so long before its look-up is a miss. An idle engine makes its two further steps in
milliseconds, just when waiting costs nobody anything."""
MAX_MISSED_STEPS = 2
MAX_BARRED_KEYS = 65536
SHARED, PRIVATE = 0, 1
NO_ROW = SlotRow(1, (0,) * MAX_RANKS, (1,) * MAX_RANKS, (0,) * MAX_RANKS)
"""In a job that every worker will fail (epoch 0) or that is empty."""
REPORT_SECONDS = 1.0


def step_seconds_from(environment: Mapping[str, str]) -> float:
    """The deadline of a step that the user set, bounded, or the default."""
    try:
        return min(MAX_STEP_SECONDS, max(0.0, float(environment[DEADLINE_VARIABLE])))
    except KeyError:
        return DEFAULT_STEP_SECONDS
    except ValueError:
        logger.warning(
            "kvoffload: %s is %r, needed a number: %g s are used",
            DEADLINE_VARIABLE,
            environment[DEADLINE_VARIABLE],
            DEFAULT_STEP_SECONDS,
        )
        return DEFAULT_STEP_SECONDS


@dataclass(slots=True)
class Answer:
    """One request's look-up: on its way (`is_complete` False), then offsets of the hits not yet taken or given
    back."""

    keys: Sequence[bytes]
    session: Session
    is_complete: bool = False
    retries: int = 0
    asked_at: float = field(default_factory=time.monotonic)
    is_given_up: bool = False
    offsets: dict[bytes, int] = field(default_factory=dict)


@dataclass(slots=True)
class RequestState:
    """What is known of a request from its arrival until vLLM has finished it."""

    namespace: int = SHARED
    answer: Answer | None = None
    stored: set[bytes] = field(default_factory=set)
    """Keys that the region has, as this request's look-ups said: not stored again by it."""
    retried_stores: int = 0


@dataclass(slots=True)
class Load:
    """A load that workers may be doing: its keys and the leased slots."""

    keys: tuple[bytes, ...]
    offsets: bytes
    epoch: int
    namespace: int


class KVOffloadManager(OffloadingManager):
    """Look-ups, loads and stores of one engine, by messages to the node daemon."""

    def __init__(self, *, step_seconds: float = DEFAULT_STEP_SECONDS) -> None:
        self._connector: Connector | None = None
        self._none_hash: Callable[[], bytes] = bytes
        self._chunks_per_step = 512
        # of the session
        self._session: Session | None = None
        self._row: SlotRow | None = None
        self._is_bound = False
        self._is_draining = False
        self._is_private = False
        self._credits: deque[int] = deque()
        self._reserving = 0
        """Number of the Reserve that has no answer yet, 0 if there is none."""
        self._owed: dict[int, tuple[str, Answer] | None] = {}
        self._next_request = 1
        # of the engine
        self._requests: dict[str, RequestState] = {}
        self._loads: dict[str, Load] = {}
        self._writing: dict[tuple[int, bytes], tuple[int, int]] = {}
        self._barred: dict[tuple[int, bytes], None] = {}
        self._unpins: list[bytes] = []
        self.pageable = False
        """Whether a rank's device refused to register pages: then no rank uses registration."""
        # waiting
        self._step_seconds = step_seconds
        self._budget_seconds = step_seconds
        self._missed_steps = 0
        self._missed_in_step = False
        self._quiet_until = 0.0
        self._steps = self._missed_deadlines = 0
        self._next_report = 0.0
        # of the connector's thread
        self._lock_descriptor = -1
        self._last_epoch = 0

    def connect(
        self, socket_path: str, *, make_hello: Callable[[], Hello], none_hash: Callable[[], bytes], chunks_per_step: int
    ) -> None:
        """Begin to talk with the daemon; called once, when the workers have told their identity."""
        self._none_hash = none_hash
        self._chunks_per_step = max(1, chunks_per_step)
        self._connector = Connector(
            socket_path,
            make_hello=make_hello,
            on_connected=self._connected,
            on_event=lambda line: logger.info("kvoffload scheduler: %s", line),
        )
        self._connector.start()

    # --- called by our connector ------------------------------------------------------------------------------------

    def begin_request(self, req_id: str, *, is_private: bool) -> None:
        """A request arrived. Private: an adapter or multimodal input, whose names mean something in this engine
        alone."""
        self._requests[req_id] = RequestState(PRIVATE if is_private else SHARED)
        self._poll()  # an engine that became ready reserves its first slots now, ahead of the first store

    def begin_lookup(self, req_id: str, keys: Sequence[bytes]) -> None:
        """The scheduler is about to look these keys up, in this step: ask for all of them at once."""
        request = self._requests.get(req_id)
        if request is None or not keys:
            return
        session = self._poll()
        if session is not None and self._row is not None:
            self._reserve(session)  # the last answer may have come short: extents are allocated as they are needed
        pending = request.answer
        if pending is not None:  # on its way since the last step
            self._wait_until(lambda: pending.is_complete)
            return
        if session is None or self._row is None or self._is_draining or self._circuit_is_open():
            return
        if not self._is_bound:
            self._is_bound = True  # a refusal comes as Refused and ends it
            self._send(session, Bind(self._none_hash(), len(keys[0]), self._is_private))
        answer = Answer(keys[:MAX_KEYS], session)
        number = self._number((req_id, answer))
        if self._send(session, Lookup(number, b"".join(answer.keys), request.namespace)):
            request.answer = answer
            self._wait_until(lambda: answer.is_complete)

    def receives_finished(self, req_ids: Iterable[str]) -> None:
        """All ranks have done with these requests' loads, well or badly: their leases go back."""
        for req_id in req_ids:
            load = self._loads.pop(req_id, None)
            if load is not None and self._is_of_this_daemon(load.epoch):
                self._unpins.append(load.offsets)
        self._flush_unpins()

    def load_failed(self, req_id: str, *, bytes_are_wrong: bool) -> None:
        """A rank could not load: the keys are a miss for this engine from now on, and for all where the bytes are
        wrong."""
        load = self._loads.get(req_id)
        if load is None:
            return
        for key in load.keys:
            self._barred[(load.namespace, key)] = None
        while len(self._barred) > MAX_BARRED_KEYS:
            del self._barred[next(iter(self._barred))]
        session = self._session
        if bytes_are_wrong and session is not None and self._is_of_this_daemon(load.epoch):
            self._send(session, Fail(session.welcome.epoch, load.offsets, drop=True))

    def end_step(self) -> None:
        """The scheduler's step is over: the next one may wait again."""
        self._steps += 1
        if self._missed_in_step:
            self._missed_steps += 1
            self._missed_deadlines += 1
            self._say_late()
        elif self._budget_seconds < self._step_seconds:
            self._missed_steps = 0  # waited, and was answered
        self._missed_in_step = False
        self._budget_seconds = self._step_seconds
        self._report()

    def weights_changed(self) -> None:
        """The weights were updated in place: what is stored from now on means something in this engine alone, and what
        was stored before is not hit. Stores under way hold what the old weights made, under the old namespace."""
        if not self._is_private:
            logger.info("kvoffload scheduler: weights are updated in place: this engine shares no chunks from now on")
        self._is_private = True
        self.reset_cache()

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """VLLM's default policy: store what was computed, skip what was loaded."""
        self._requests.setdefault(req_context.req_id, RequestState())
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request; leases of an answer that nobody used go back."""
        request = self._requests.pop(req_context.req_id, None)
        if request is not None and request.answer is not None:
            self._release(request.answer)
            self._flush_unpins()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """From the request's one answer."""
        request = self._requests.get(req_context.req_id)
        answer = request.answer if request is not None else None
        if request is None or answer is None:
            return LookupResult.MISS
        if not answer.is_complete:
            if answer.retries >= MAX_RETRIES and time.monotonic() - answer.asked_at >= RETRY_SECONDS:
                answer.is_given_up = True
            return LookupResult.MISS if answer.is_given_up else LookupResult.RETRY
        if key not in answer.offsets or (request.namespace, key) in self._barred:
            return LookupResult.MISS
        return LookupResult.HIT

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """The leased slots of these keys. A key without one (a bug, or a daemon that went in between) makes a load
        that every worker fails, and so a recomputation."""
        request = self._requests[req_context.req_id]
        answer = request.answer
        row = self._row or NO_ROW
        offsets = [answer.offsets.pop(key, -1) if answer is not None else -1 for key in keys]
        packed = np.array(offsets, dtype="<i8").tobytes()
        leased = np.array([offset for offset in offsets if offset >= 0], dtype="<i8").tobytes()
        epoch = answer.session.welcome.epoch if answer is not None else 0
        # In this order: a restarting daemon is told of all loads that are here when we connect to it.
        self._loads[req_context.req_id] = Load(tuple(keys), leased, epoch, request.namespace)
        if answer is None or not answer.session.is_open or -1 in offsets:
            epoch = 0
        return RegionSlots(epoch, packed, row, self.pageable)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserved slots for the keys that the region does not have yet; as many as there are, the first ones
        first."""
        request = self._requests.get(req_context.req_id) or RequestState()
        session = self._poll()
        row = self._row
        wanted = [
            key
            for key in keys
            if key not in request.stored
            and (request.namespace, key) not in self._writing
            and (request.namespace, key) not in self._barred
        ]
        if session is None or row is None or not self._is_bound or self._is_draining:
            wanted = []
        elif len(wanted) > len(self._credits) and not self._circuit_is_open():
            self._reserve(session)
            self._wait_until(lambda: len(self._credits) >= len(wanted) or not self._reserving)
            if len(wanted) > len(self._credits) and self._reserving and request.retried_stores < MAX_RETRIES:
                request.retried_stores += 1
                return None
        chosen = wanted[: len(self._credits)]
        packed = np.array([self._credits.popleft() for _ in chosen], dtype="<i8").tobytes()
        epoch = session.welcome.epoch if session is not None else 0
        if chosen and session is not None:
            for index, key in enumerate(chosen):
                offset = int.from_bytes(packed[8 * index : 8 * index + 8], "little")
                self._writing[(request.namespace, key)] = (offset, epoch)
            self._send(session, Assign(epoch, packed, b"".join(chosen), request.namespace))
        if session is not None and row is not None and self._is_bound and not self._is_draining:
            self._reserve(session)
        return PrepareStoreOutput(
            keys_to_store=chosen,
            store_spec=RegionSlots(epoch, packed, row or NO_ROW, self.pageable),
            evicted_keys=[],
        )

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """All ranks have written (each told the daemon itself): nothing to send."""
        request = self._requests.get(req_context.req_id)
        for key in keys:
            for namespace in (SHARED, PRIVATE) if request is None else (request.namespace,):
                self._writing.pop((namespace, key), None)
            if request is not None and success:
                request.stored.add(key)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002 - vLLM's signature
        """Give back what was leased in this step and not taken by a load."""
        for request in self._requests.values():
            answer = request.answer
            if answer is None:
                continue
            if answer.is_complete:
                self._release(answer)
                request.answer = None
            else:
                answer.retries += 1
                if answer.is_given_up:
                    request.answer = None  # given back when it comes
        self._flush_unpins()

    def reset_cache(self) -> None:
        """A new generation: nothing that this engine stored before is hit by it. Loads under way keep their leases
        until the workers report them, and other engines keep their keys."""
        self._writing.clear()
        for request in self._requests.values():
            request.stored.clear()
            if request.answer is not None:
                self._release(request.answer)
                request.answer = None
        self._barred.clear()
        self._flush_unpins()
        session = self._poll()
        if session is None:
            return
        if self._credits:
            self._send(session, Fail(session.welcome.epoch, np.array(self._credits, dtype="<i8").tobytes()))
            self._credits.clear()
        self._reserving = 0
        self._send(session, Generation(private=self._is_private))
        self._reserve(session)

    def has_pending_work(self) -> bool:
        """Nothing of ours needs a step: what is under way ends without the scheduler."""
        return False

    def shutdown(self) -> None:
        """End the session: the daemon gives back all that it holds."""
        self._report(force=True)
        if self._connector is not None:
            self._connector.close()
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    # --- messages ---------------------------------------------------------------------------------------------------

    def _poll(self, timeout_seconds: float = 0.0) -> Session | None:
        """The present session, after taking in what has come. A session that ended takes its answers and credits
        with it."""
        session = self._connector.current() if self._connector is not None else None
        if session is not self._session:
            self._forget_session(session)
        if session is None:
            return None
        try:
            for message in session.receive(timeout_seconds):
                self._take(session, message)
        except DaemonUnavailable:
            self._forget_session(None)
            return None
        return session

    def _forget_session(self, successor: Session | None) -> None:
        self._session = successor
        self._row = None
        self._is_bound = self._is_draining = False
        self._credits.clear()
        self._reserving = 0
        self._owed.clear()
        self._unpins.clear()
        self._missed_steps = 0
        for request in self._requests.values():
            request.answer = None

    def _take(self, session: Session, message: FromDaemon) -> None:
        if isinstance(message, Found):
            self._take_found(message)
        elif isinstance(message, Reserved):
            self._owed.pop(message.request, None)
            if message.request == self._reserving:
                self._reserving = 0
                self._credits.extend(np.frombuffer(message.offsets, dtype="<i8").tolist())
            elif message.offsets:  # of before a reset: what is stored there would count as stored before it
                self._send(session, Fail(message.epoch, message.offsets))
        elif isinstance(message, EngineReady):
            self._row = SlotRow(message.slot_bytes, message.part_offsets, message.sharers, message.sharer_index)
            self._reserve(session)
            logger.info(
                "kvoffload scheduler: offload is on: %s, %d bytes a slot%s",
                "one copy for all ranks" if message.replicated else "a part for each rank",
                message.slot_bytes,
                f" ({message.reason})" if message.reason else "",
            )
        elif isinstance(message, EngineLost):
            self._row = None
            logger.info("kvoffload scheduler: offload pauses: %s", message.message)
        elif isinstance(message, Bound):
            logger.info("kvoffload scheduler: the region has %d chunks for this model", message.num_ready)
        elif isinstance(message, Drain):
            self._is_draining = True
            logger.info("kvoffload scheduler: the node daemon stops: %s", message.message)
        elif isinstance(message, Refused):
            logger.warning("kvoffload scheduler: the node daemon refused: %s: %s", message.reason, message.message)
            self._row = None

    def _take_found(self, message: Found) -> None:
        owed = self._owed.pop(message.request, None)
        if owed is None:
            return
        req_id, answer = owed
        offsets = np.frombuffer(message.offsets, dtype="<i8")
        if offsets.size != len(answer.keys):
            answer.session.close(f"the daemon answered {len(answer.keys)} keys with {offsets.size} offsets")
            return
        answer.offsets = {answer.keys[index]: int(offsets[index]) for index in np.flatnonzero(offsets >= 0).tolist()}
        answer.is_complete = True
        request = self._requests.get(req_id)
        if request is None or request.answer is not answer:
            self._release(answer)  # too late: aborted, or given up
        else:
            request.stored.update(answer.offsets)

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Receive until it is done or the step's budget is spent."""
        while not is_done():
            if self._budget_seconds <= 0:
                self._missed_in_step = True
                return
            begin = time.monotonic()
            session = self._poll(self._budget_seconds)
            self._budget_seconds -= time.monotonic() - begin
            if session is None:
                return

    def _circuit_is_open(self) -> bool:
        """Open after missed steps in a row, until the daemon has answered all that it owes."""
        if self._missed_steps < MAX_MISSED_STEPS:
            return False
        if self._owed:
            return True
        self._missed_steps = 0
        return False

    def _say_late(self) -> None:
        now = time.monotonic()
        if self._missed_steps >= MAX_MISSED_STEPS and now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            logger.warning(
                "kvoffload scheduler: the node daemon did not answer within %g ms in %d steps in a row: everything is "
                "a miss until it has answered",
                1000 * self._step_seconds,
                self._missed_steps,
            )

    def _reserve(self, session: Session) -> None:
        """Ask for slots ahead of need, so that a store finds them here."""
        target = min(MAX_KEYS, 2 * self._chunks_per_step)
        if self._row is not None:
            target = max(1, min(target, session.welcome.region_bytes // self._row.slot_bytes // 8))
        missing = target - len(self._credits)
        if self._reserving or 2 * missing < target:
            return
        self._reserving = self._number(None)
        self._send(session, Reserve(self._reserving, missing))

    def _number(self, owed: tuple[str, Answer] | None) -> int:
        number, self._next_request = self._next_request, self._next_request + 1
        self._owed[number] = owed
        return number

    def _send(self, session: Session, *messages: Message) -> bool:
        try:
            session.send(*messages)
        except DaemonUnavailable:
            return False  # the next poll sees the session closed
        return True

    def _release(self, answer: Answer) -> None:
        if answer.offsets and answer.session is self._session:
            self._unpins.append(np.array(list(answer.offsets.values()), dtype="<i8").tobytes())
        answer.offsets = {}

    def _flush_unpins(self) -> None:
        session = self._session
        if self._unpins and session is not None:
            packed = b"".join(self._unpins)
            step = 8 * MAX_KEYS
            self._send(session, *(Unpin(packed[begin : begin + step]) for begin in range(0, len(packed), step)))
        self._unpins.clear()

    def _is_of_this_daemon(self, epoch: int) -> bool:
        """Whether leases of this epoch are known to the present daemon: its own, or re-asserted to it."""
        return self._session is not None and 0 < epoch <= self._session.welcome.epoch

    def _connected(self, session: Session) -> None:
        """In the connector's thread, before anybody sees the new session: what workers may still read or write."""
        (lock,) = session.take_descriptors()
        old_lock, self._lock_descriptor = self._lock_descriptor, lock
        if self._last_epoch:
            loads, writes = list(self._loads.values()), list(self._writing.values())
            oldest = min([self._last_epoch, *(load.epoch for load in loads), *(epoch for _, epoch in writes)])
            offsets = np.array([offset for offset, _ in writes], dtype="<i8").tobytes()
            session.send(Reassert(oldest, b"".join(load.offsets for load in loads), offsets))
        self._last_epoch = session.welcome.epoch
        if old_lock >= 0:
            os.close(old_lock)

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not self._steps or (now < self._next_report and not force):
            return
        self._next_report = now + REPORT_SECONDS
        session = self._session
        if session is not None and self._send(
            session, Report(missed_deadlines=self._missed_deadlines, steps=self._steps)
        ):
            self._steps = self._missed_deadlines = 0
