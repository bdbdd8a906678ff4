"""The scheduler's side: which chunks the region holds, and which slots new ones go to.

Runs in vLLM's engine core, in the scheduler's thread; called by vLLM's offloading scheduler (the `OffloadingManager`
interface) and by our connector (`begin_request`, `begin_lookup`, `receives_finished`, `load_failed`, `end_step`).

    a request's life
      begin_request     its namespace: shared, or private to the engine (adapter, multimodal input)
      begin_lookup      one look-up of all its keys; the answer leases every hit
      lookup (key)      from the answer; RETRY while it is on its way, twice and for 50 ms at least, then a miss
      prepare_load      takes leased slots out of the answer, for the workers
      on_schedule_end   leases of the answer that no load took are given back
      receives_finished (all ranks): the load's leases are given back
      prepare_store     keys that are not there yet get reserved slots; each worker seals what it wrote
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

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

from kvoffload.layout.rows import MAX_RANKS
from kvoffload.protocol.messages import Hello
from kvoffload_engine.budget import DEFAULT_STEP_SECONDS
from kvoffload_engine.link import Answer, DaemonLink
from kvoffload_engine.log import logger
from kvoffload_engine.offsets import pack
from kvoffload_engine.reassertion import Held
from kvoffload_engine.slots import RegionSlots, SlotRow

MAX_RETRIES = 2
RETRY_STEPS = 25
MAX_RETRY_SECONDS = 0.5
"""A request is deferred for so many deadlines (50 ms of 2 ms each), but no longer than this, before its look-up is a
miss. An idle engine makes its two further steps in milliseconds, just when waiting costs nobody anything."""
MAX_BARRED_KEYS = 65536
SHARED, PRIVATE = 0, 1
HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
"""Names of the module: `lookup` runs once a key, and the enum's own took a quarter of its time."""
NO_ROW = SlotRow(1, (0,) * MAX_RANKS, (1,) * MAX_RANKS, (0,) * MAX_RANKS)
"""In a job that every worker will fail (epoch 0) or that is empty."""


@dataclass(slots=True)
class RequestState:
    """What is known of a request from its arrival until vLLM has finished it."""

    namespace: int = SHARED
    answer: Answer | None = None
    retries: int = 0
    """Steps that ended while its answer was on its way."""
    asked_at: float = 0.0
    stored: set[bytes] = field(default_factory=set)
    """Keys that the region has, as its last look-up said or its own stores did: not stored again by it."""
    retried_stores: int = 0
    mixes_weights: bool = False
    """The weights were updated while it was there: its KV is of the old ones, or of both, and is not stored."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load that workers may be doing."""

    keys: tuple[bytes, ...]
    namespace: int
    held: Held


class KVOffloadManager(OffloadingManager):
    """Look-ups, loads and stores of one engine, through its link to the node daemon."""

    def __init__(self, *, step_seconds: float = DEFAULT_STEP_SECONDS) -> None:
        self.link = DaemonLink(step_seconds=step_seconds, holdings=self._holdings)
        self._retry_seconds = min(MAX_RETRY_SECONDS, RETRY_STEPS * step_seconds)
        self.pageable = False
        """Whether a rank's device refused to register pages: then no rank uses registration."""
        self._requests: dict[str, RequestState] = {}
        self._loads: dict[str, Load] = {}
        self._writing: tuple[dict[bytes, Held], dict[bytes, Held]] = ({}, {})
        """Stores under way, by namespace and key."""
        self._barred: tuple[dict[bytes, None], dict[bytes, None]] = ({}, {})
        """Keys of failed loads, by namespace; the oldest go first."""

    def connect(
        self, socket_path: str, *, make_hello: Callable[[], Hello], none_hash: Callable[[], bytes], chunks_per_step: int
    ) -> None:
        """Begin to talk with the daemon; called once, when the workers have told their identity."""
        self.link.connect(socket_path, make_hello=make_hello, none_hash=none_hash, chunks_per_step=chunks_per_step)

    # --- called by our connector ------------------------------------------------------------------------------------

    def begin_request(self, req_id: str, *, is_private: bool) -> None:
        """A request arrived. Private: an adapter or multimodal input, whose names mean something in this engine
        alone."""
        self._requests[req_id] = RequestState(PRIVATE if is_private else SHARED)
        self.link.poll()  # an engine that became ready reserves its first slots now, ahead of the first store

    def begin_lookup(self, req_id: str, keys: Sequence[bytes]) -> None:
        """The scheduler is about to look these keys up, in this step: ask for all of them at once."""
        request = self._requests.get(req_id)
        if request is None or not keys:
            return
        session = self.link.poll()
        self.link.reserve()  # the last answer may have come short: extents are allocated as they are needed
        answer = request.answer
        if answer is None or answer.session is not session:
            request.retries, request.asked_at = 0, time.monotonic()
            request.answer = answer = self.link.look_up(keys, request.namespace)
        else:  # on its way since an earlier step, or it came since, and leases what it found
            self.link.wait_for(answer)
        if answer is None:
            return
        if answer.is_complete:
            request.stored = answer.hits
        elif request.retries >= MAX_RETRIES and time.monotonic() - request.asked_at >= self._retry_seconds:
            self.link.abandon(answer)
            request.answer = None

    def receives_finished(self, req_ids: Iterable[str]) -> None:
        """All ranks have done with these requests' loads, well or badly: their leases go back."""
        for req_id in req_ids:
            load = self._loads.pop(req_id, None)
            if load is not None:
                self.link.unpin(load.held)
        self.link.flush()

    def load_failed(self, req_id: str, *, bytes_are_wrong: bool) -> None:
        """A rank could not load: the keys are a miss for this engine from now on, and for all if the bytes are
        wrong."""
        load = self._loads.get(req_id)
        if load is None:
            return
        barred = self._barred[load.namespace]
        barred.update(dict.fromkeys(load.keys))
        while len(barred) > MAX_BARRED_KEYS:
            del barred[next(iter(barred))]
        if bytes_are_wrong:
            self.link.drop(load.held)

    def end_step(self) -> None:
        """The scheduler's step is over: the next one may wait again."""
        self.link.end_step()

    def weights_changed(self) -> None:
        """The weights were updated in place: what is stored from now on means something in this engine alone, and what
        was stored before is not hit. Stores under way hold what the old weights made, under the old namespace."""
        if not self.link.is_private:
            logger.info("kvoffload scheduler: weights are updated in place: this engine shares no chunks from now on")
        self.link.is_private = True
        for request in self._requests.values():
            request.mixes_weights = True
        self.reset_cache()

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """vLLM's default policy: store what was computed, skip what was loaded."""
        self._requests.setdefault(req_context.req_id, RequestState())
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request; leases of an answer that nobody used go back."""
        request = self._requests.pop(req_context.req_id, None)
        if request is not None and request.answer is not None:
            self.link.abandon(request.answer)
            self.link.flush()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """From the request's one answer."""
        request = self._requests.get(req_context.req_id)
        if request is None or request.answer is None:
            return MISS
        answer = request.answer
        if key in answer.offsets:
            return MISS if key in self._barred[request.namespace] else HIT
        return MISS if answer.is_complete else RETRY

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """The leased slots of these keys. A key without one (a bug, or a daemon that went in between) makes a load
        that every worker fails, and so a recomputation."""
        request = self._requests[req_context.req_id]
        answer = request.answer
        if answer is None:
            self._loads[req_context.req_id] = Load(tuple(keys), request.namespace, Held(b"", 0))
            return RegionSlots(0, pack([-1] * len(keys)), NO_ROW, self.pageable)
        offsets = [answer.offsets.pop(key, -1) for key in keys]
        epoch = answer.session.welcome.epoch
        held = Held(pack(offset for offset in offsets if offset >= 0), epoch, answer.session)
        # In this order: a restarting daemon is told of all loads that are here when we connect to it.
        self._loads[req_context.req_id] = Load(tuple(keys), request.namespace, held)
        if not answer.session.is_open or -1 in offsets:
            epoch = 0
        return RegionSlots(epoch, pack(offsets), answer.row, self.pageable)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserved slots for the keys that the region does not have yet; as many as there are, the first ones first.

        None while the answer to a Reserve is late: vLLM then asks again in the next step, twice at most.
        """
        request = self._requests.get(req_context.req_id)
        if request is None:  # nobody has said whether its keys are private
            return PrepareStoreOutput(keys_to_store=[], store_spec=RegionSlots(0, b"", NO_ROW), evicted_keys=[])
        writing, barred = self._writing[request.namespace], self._barred[request.namespace]
        stored = request.stored
        self.link.poll()
        wanted = [key for key in keys if key not in stored and key not in writing and key not in barred]
        if request.mixes_weights:
            wanted = []
        if not self.link.wait_for_slots(len(wanted)) and request.retried_stores < MAX_RETRIES:
            request.retried_stores += 1
            return None
        packed, epoch = self.link.assign(wanted, request.namespace)
        chosen = wanted[: len(packed) // 8]
        for index, key in enumerate(chosen):
            writing[key] = Held(packed[8 * index : 8 * index + 8], epoch)
        return PrepareStoreOutput(
            keys_to_store=chosen,
            store_spec=RegionSlots(epoch, packed, self.link.row or NO_ROW, self.pageable),
            evicted_keys=[],
        )

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """All ranks have written (each told the daemon itself): nothing to send."""
        request = self._requests.get(req_context.req_id)
        for writing in self._writing if request is None else (self._writing[request.namespace],):
            for key in keys:
                writing.pop(key, None)
        if request is not None and success:
            request.stored.update(keys)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002 - vLLM's signature
        """Give back what was leased in this step and not taken by a load."""
        for request in self._requests.values():
            answer = request.answer
            if answer is None:
                continue
            if answer.is_complete:
                self.link.abandon(answer)
                request.answer = None
            else:
                request.retries += 1
        self.link.flush()

    def reset_cache(self) -> None:
        """A new generation: nothing that this engine stored before is hit by it. Loads under way keep their leases
        until the workers report them, and other engines keep their keys."""
        for of_namespace in (*self._writing, *self._barred):
            of_namespace.clear()
        for request in self._requests.values():
            request.stored = set()
            if request.answer is not None:
                self.link.abandon(request.answer)
                request.answer = None
        self.link.flush()
        self.link.begin_generation()

    def has_pending_work(self) -> bool:
        """Nothing of ours needs a step: what is under way ends without the scheduler."""
        return False

    def shutdown(self) -> None:
        """End the session: the daemon gives back all that it holds."""
        self.link.close()

    def _holdings(self) -> tuple[list[Held], list[Held]]:
        """What workers may still read and write, for a daemon that came back; called from the connector's thread."""
        loads = [load.held for load in list(self._loads.values())]
        return loads, [held for writing in self._writing for held in list(writing.values())]
