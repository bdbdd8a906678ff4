"""Leader election by a `coordination.k8s.io` Lease. Runs in the operator, around everything that writes.

A leader may write only until `renew_deadline` after the *start* of its last successful renewal; others may take over
only `lease_seconds` after they last saw the lease change, by their own monotonic clocks. The deadline is shorter, so
that also a leader that was stopped (SIGSTOP) or cut off and comes back finds its time over before its first write.

    renewed            deadline              lease over
       |--- may write ---|--- nobody writes ---|--- another may write -->
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvoffload.errors import KVOffloadError
from kvoffload_operator.kube import DEPLOYMENTS, LEASES, ApiServerError, KubeClient

logger = logging.getLogger(__name__)

Clock = Callable[[], float]


class NotLeader(KVOffloadError):
    """This process does not hold the lease, or no longer can be sure of it."""


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Durations of the election, seconds; `renew_deadline` must be below `lease`."""

    lease: float
    renew_deadline: float
    retry: float


class Election:
    """One candidate; the lease has the name of the candidates' Deployment."""

    def __init__(
        self,
        kube: KubeClient,
        *,
        name: str,
        namespace: str,
        identity: str,
        times: LeaseTimes,
        clock: Clock = time.monotonic,
    ) -> None:
        if times.renew_deadline + times.retry > times.lease:
            raise ValueError(
                f"renew deadline {times.renew_deadline} s + retry {times.retry} s must not exceed the lease of "
                f"{times.lease} s"
            )
        self._kube, self._clock, self._times = kube, clock, times
        self._name, self._namespace, self._identity = name, namespace, identity
        self._seen_version = ""
        self._seen_at = float("-inf")
        self._writes_until = float("-inf")

    @property
    def is_leader(self) -> bool:
        """Whether this process may write now."""
        return self._clock() < self._writes_until

    def check(self) -> None:
        """Raise `NotLeader` where this process may not write; the guard of the client that reconciles."""
        if not self.is_leader:
            raise NotLeader(f"{self._identity} does not hold the lease {self._namespace}/{self._name}: not writing")

    async def acquire(self) -> None:
        """Wait until this candidate is the leader."""
        stands_by = False
        while not await self._try():
            if self._seen_version and not stands_by:
                stands_by = True
                logger.info("%s stands by for the lease %s/%s", self._identity, self._namespace, self._name)
            await asyncio.sleep(self._times.retry)
        logger.info("%s is the leader", self._identity)

    async def hold(self) -> None:
        """Renew for as long as it works; returns when the lease is lost."""
        while self.is_leader:
            await asyncio.sleep(self._times.retry)
            await self._try()
        self._writes_until = float("-inf")
        logger.error("%s lost the lease %s/%s", self._identity, self._namespace, self._name)

    async def release(self) -> None:
        """Let the next one in at once, at a clean end."""
        if not self.is_leader:
            return
        self._writes_until = float("-inf")
        try:
            lease = await self._kube.get(LEASES, self._name, self._namespace)
            if lease is not None and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                lease["spec"] = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                await self._kube.replace(LEASES, lease, self._namespace)
        except ApiServerError as error:
            logger.info("lease not released, the next leader waits for its end: %s", error)

    async def _try(self) -> bool:
        """Take or renew; True if this candidate is the leader after it."""
        started = self._clock()
        try:
            lease = await asyncio.wait_for(self._take(started), self._times.renew_deadline)
        except (ApiServerError, TimeoutError) as error:
            logger.warning("lease %s/%s: %s", self._namespace, self._name, error or "no answer in time")
            return False
        if lease is None:
            return False
        self._seen_version = lease["metadata"]["resourceVersion"]
        self._writes_until = started + self._times.renew_deadline
        return True

    async def _take(self, now: float) -> dict[str, Any] | None:
        lease = await self._kube.get(LEASES, self._name, self._namespace)
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._times.lease),
            "renewTime": stamp,
        }
        if lease is None:
            if self._seen_version and not self.is_leader:  # deleted under its holder, who writes until its deadline
                self._seen_version, self._seen_at = "", now
            owners = await self._find_owners()
            if not owners or now - self._seen_at < self._times.lease:
                return None
            manifest = {
                "metadata": {"name": self._name, "namespace": self._namespace, "ownerReferences": owners},
                "spec": {**spec, "acquireTime": stamp, "leaseTransitions": 0},
            }
            return await self._kube.create(LEASES, manifest, self._namespace)
        before = lease.get("spec") or {}
        holder = before.get("holderIdentity", "")
        if holder == self._identity:
            lease["spec"] = {**before, **spec}
            return await self._kube.replace(LEASES, lease, self._namespace)
        self._writes_until = float("-inf")
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen_version:
            self._seen_version, self._seen_at = version, now
            if holder:
                return None
        if holder and now - self._seen_at < self._times.lease:
            return None
        owners = await self._find_owners()
        if not owners:
            return None
        lease["metadata"]["ownerReferences"] = owners
        transitions = before.get("leaseTransitions", 0) + 1
        lease["spec"] = {**before, **spec, "acquireTime": stamp, "leaseTransitions": transitions}
        return await self._kube.replace(LEASES, lease, self._namespace)

    async def _find_owners(self) -> list[dict[str, str]]:
        """The candidates' Deployment: the lease goes with it, and is not made again by a replica that outlives it."""
        deployment = await self._kube.get(DEPLOYMENTS, self._name, self._namespace)
        if deployment is None:
            logger.warning("Deployment %s/%s is not there: no lease is taken", self._namespace, self._name)
            return []
        owner = {"apiVersion": DEPLOYMENTS.api_version, "kind": DEPLOYMENTS.kind, "name": self._name}
        return [{**owner, "uid": deployment["metadata"]["uid"]}]


class LeaseKeeper:
    """Runs an election in a thread with an event loop of its own.

    Reconciling a thousand nodes keeps the process's loop busy for longer than a renewal may wait.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[KubeClient]], make_election: Callable[[KubeClient], Election]
    ) -> None:
        self._connect, self._make_election = connect, make_election
        self._election: Election | None = None
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._acquired, self._ended = asyncio.Event(), asyncio.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this process may write now."""
        return self._election is not None and self._election.is_leader

    def check(self) -> None:
        """Raise `NotLeader` where this process may not write."""
        if self._election is None:
            raise NotLeader("no election is held yet: not writing")
        self._election.check()

    async def acquire(self) -> None:
        """Wait until this process is the leader.

        Raises:
            NotLeader: the election ended before, for example because there is no way to the API server's address.
        """
        caller = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(caller,), name="lease", daemon=True)
        self._thread.start()
        waits = [asyncio.create_task(event.wait()) for event in (self._acquired, self._ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not self._acquired.is_set():
            raise NotLeader(f"the election ended: {self._failure or 'told to stop'}") from self._failure

    async def hold(self) -> None:
        """Wait until the lease is lost."""
        await self._ended.wait()

    async def release(self) -> None:
        """Give the lease back and end the thread."""
        if self._own_loop is not None and self._stop is not None and not self._ended.is_set():
            self._own_loop.call_soon_threadsafe(self._stop.set)
            await self._ended.wait()

    def _run(self, caller: asyncio.AbstractEventLoop) -> None:
        try:
            asyncio.run(self._main(caller))
        except Exception as error:  # noqa: BLE001 -- the thread's boundary: told to the caller, who ends the process
            self._failure = error
            logger.error("election ended: %s", error)
        finally:
            caller.call_soon_threadsafe(self._ended.set)

    async def _main(self, caller: asyncio.AbstractEventLoop) -> None:
        self._own_loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        kube = await self._connect()
        try:
            election = self._election = self._make_election(kube)
            campaign = asyncio.create_task(self._campaign(election, caller))
            stopped = asyncio.create_task(self._stop.wait())
            await asyncio.wait({campaign, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for task in (campaign, stopped):
                task.cancel()
            await asyncio.gather(campaign, stopped, return_exceptions=True)
            await election.release()
        finally:
            await kube.close()

    async def _campaign(self, election: Election, caller: asyncio.AbstractEventLoop) -> None:
        await election.acquire()
        caller.call_soon_threadsafe(self._acquired.set)
        await election.hold()
