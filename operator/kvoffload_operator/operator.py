"""The operator process: election, watches, workers, the sweep. Started by `__main__ run`.

acquire the lease
  |-- watch_cluster (kopf)  -> view, queue
  |-- workers               <- queue: reconcile a pool or look at a pod
  |-- resync                   list everything now and then: what a broken watch missed
  |-- webhook                  certificates, health
  '-- hold the lease           lost: the process exits, and starts anew as a candidate
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn

from kvoffload.api.keys import DAEMON_OF_LABEL, OPERATOR_FIELD_MANAGER, POOL_LABEL
from kvoffload.api.pool import Mode, PageSize
from kvoffload.api.schema import build_crds, fields_only_in
from kvoffload.errors import KVOffloadError
from kvoffload_operator import metrics
from kvoffload_operator.events import EventRecorder
from kvoffload_operator.handlers import watch_cluster
from kvoffload_operator.kube import (
    CRDS,
    DAEMONSETS,
    DEPLOYMENTS,
    NODES,
    PODS,
    POOLS,
    REGIONS,
    ApiServerError,
    KubeClient,
    Manifest,
    Resource,
)
from kvoffload_operator.leader import Election, LeaseKeeper, LeaseTimes, NotLeader
from kvoffload_operator.reconcilers.pod import UNATTACHED_REASONS, PodReconciler
from kvoffload_operator.reconcilers.pool import PoolReconciler
from kvoffload_operator.resources.daemonset import DaemonSetOptions
from kvoffload_operator.settings import Settings
from kvoffload_operator.status import InjectionHealth, count_degradations
from kvoffload_operator.view import ClusterView, Dirty, key_of
from kvoffload_operator.webhook_health import look_after_webhook, unknown_injection
from kvoffload_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 15.0
RETRY_SECONDS = 5.0
START_SECONDS, START_RETRY_SECONDS = 60.0, 1.0
POOL_WORKERS = 1
"""One: two pools that overlap are planned one after the other, so that both cannot take the same pages."""
POD_WORKERS = 4
SETTLE_SECONDS = 1.0
"""A pool's changes of this long are one pass: a thousand nodes report in the same second."""


@dataclass(frozen=True, slots=True)
class Key:
    """What needs a pass: a pool by name, or a pod by `namespace/name`."""

    kind: str
    name: str


class Operator:
    """One replica."""

    def __init__(self, settings: Settings, kube: KubeClient, election: LeaseKeeper) -> None:
        self._settings, self._kube, self._election = settings, kube, election
        self._view = ClusterView()
        self._pools: WorkQueue[Key] = WorkQueue()
        self._pods: WorkQueue[Key] = WorkQueue()
        self._synced = asyncio.Event()
        self._num_writes_counted = 0
        kube.check_may_write = election.check

    async def run(self) -> None:
        """Be a candidate, then the leader; returns when the lease is lost, and gives it back when cancelled."""
        try:
            options = await self._daemonset_options()  # before the lease: nobody renews it yet while this waits
            await self._election.acquire()
            metrics.is_leader.set(1)
            await self._apply_crds()
            recorder = EventRecorder(self._kube, instance=self._settings.pod_name)
            pools = PoolReconciler(
                self._kube,
                self._view,
                options=options,
                recorder=recorder,
                silence_seconds=self._settings.daemon_silence_seconds,
                write_parallelism=self._settings.write_parallelism,
            )
            pods = PodReconciler(
                self._view,
                recorder,
                unattached_seconds=self._settings.unattached_seconds,
                namespace=self._settings.namespace,
            )
            tasks = {
                asyncio.create_task(coroutine, name=name)
                for name, coroutine in (
                    ("lease", self._election.hold()),
                    ("watch", watch_cluster(self._view, self._on_dirty, identity=self._settings.pod_name)),
                    ("resync", self._resync_forever()),
                    ("webhook", self._look_after_webhook(pools, dict(options.owner))),
                    ("sweep", self._sweep_forever(pods)),
                    *((f"pool-{number}", self._work(self._pools, pools.reconcile)) for number in range(POOL_WORKERS)),
                    *((f"pod-{number}", self._work(self._pods, pods.reconcile)) for number in range(POD_WORKERS)),
                )
            }
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            for task in done:
                logger.error("%s ended: %s", task.get_name(), task.exception() or "no error")
        finally:
            metrics.is_leader.set(0)
            metrics.injection_ready.set(0)
            await self._election.release()

    # --- start ------------------------------------------------------------------------------------------------------

    async def _daemonset_options(self) -> DaemonSetOptions:
        settings = self._settings
        name = f"{settings.release}-operator"
        deployment = await self._read_deployment(name)
        if deployment is None:
            raise KVOffloadError(
                f"Deployment {settings.namespace}/{name} is not there: it owns the DaemonSets. Set KVOFFLOAD_RELEASE"
            )
        return DaemonSetOptions(
            namespace=settings.namespace,
            image=settings.node_image,
            image_pull_policy=settings.image_pull_policy,
            image_pull_secrets=tuple(settings.image_pull_secrets),
            kubelet_root_dir=settings.kubelet_root_dir,
            hugetlbfs_paths={PageSize.MI_2: settings.hugetlbfs_path_2mi, PageSize.GI_1: settings.hugetlbfs_path_1gi},
            service_account=settings.node_service_account,
            priority_class=settings.node_priority_class,
            labels=settings.node_labels,
            pod_annotations=settings.node_pod_annotations,
            resources=settings.node_resources,
            log_level=settings.log_level,
            owner={"name": name, "uid": deployment["metadata"]["uid"]},
        )

    async def _read_deployment(self, name: str) -> Manifest | None:
        """The operator's own. What the API server refuses for a while is waited for; raises ApiServerError after
        `START_SECONDS`, so that the pod shows a lasting refusal as a crash."""
        give_up_at = time.monotonic() + START_SECONDS
        while True:
            try:
                return await self._kube.get(DEPLOYMENTS, name, self._settings.namespace)
            except ApiServerError as error:
                if time.monotonic() > give_up_at:
                    raise
                logger.warning("Deployment %s not read, again in %.0f s: %s", name, START_RETRY_SECONDS, error)
                await asyncio.sleep(START_RETRY_SECONDS)

    async def _apply_crds(self) -> None:
        """Helm installs CRDs once and never upgrades them; the leader does, where it may, and never goes backwards."""
        if not self._settings.apply_crds:
            return
        for crd in build_crds().values():
            name = crd["metadata"]["name"]
            try:
                newer = fields_only_in(await self._kube.get(CRDS, name) or {}, crd)
                if newer:
                    # an older schema would take these fields out of every stored object; versions only add fields
                    logger.warning("CRD %s stays as it is, it has fields of a newer version: %s", name, newer)
                    continue
                await self._kube.apply(CRDS, crd, field_manager=OPERATOR_FIELD_MANAGER)
            except ApiServerError as error:
                # an older CRD still serves; the condition Degraded names the fields that it lacks
                logger.warning("CRD %s not applied: %s", name, error)

    # --- events -----------------------------------------------------------------------------------------------------

    def _on_dirty(self, dirty: Dirty) -> None:
        for pool in dirty.pools:
            self._pools.add_later(Key("pool", pool), SETTLE_SECONDS)
        for pod in dirty.pods:
            self._pods.add(Key("pod", pod))

    async def _resync_forever(self) -> None:
        """List everything, at first to know it before anything is done, then for what a broken watch missed."""

        async def resync() -> float:
            await self._resync()
            self._synced.set()
            return self._settings.resync_seconds

        await self._repeat("resync", resync)

    async def _resync(self) -> None:
        view, namespace = self._view, self._settings.namespace
        update: tuple[tuple[Resource, Callable[..., Dirty], dict[str, str]], ...] = (
            (POOLS, view.update_pool, {}),
            (NODES, view.update_node, {}),
            (DAEMONSETS, view.update_daemonset, {"namespace": namespace, "label_selector": DAEMON_OF_LABEL}),
            (REGIONS, view.update_region, {}),
            (PODS, view.update_pod, {"label_selector": POOL_LABEL}),
        )
        view.begin_listing()
        for resource, take, query in update:
            kind = resource.plural
            before = view.keys_of(kind)
            seen = set()
            for manifest in await self._kube.list_all(resource, **query):
                key = key_of(kind, manifest)
                seen.add(key)
                try:
                    self._on_dirty(take(manifest))
                except KVOffloadError as error:
                    logger.warning("%s %s: %s", kind, key, error)
                    self._on_dirty(view.forget(kind, key))
            for key in before - seen:
                self._on_dirty(view.forget(kind, key))
        self._on_dirty(Dirty(pools=view.pools_known()))

    # --- work -------------------------------------------------------------------------------------------------------

    async def _work(self, queue: WorkQueue[Key], reconcile: Callable[[str, datetime], Awaitable[float | None]]) -> None:
        await self._synced.wait()
        while True:
            key = await queue.get()
            started = time.monotonic()
            try:
                again = await reconcile(key.name, datetime.now(UTC))
            except NotLeader:
                raise
            except Exception as error:  # noqa: BLE001 -- one object must not end what looks at all the others
                metrics.reconcile_errors_total.labels(kind=key.kind).inc()
                delay = queue.failed(key)
                note_failure(key.kind, f"{key.kind} {key.name}", error, delay)
            else:
                queue.done(key)
                if again is not None:
                    queue.add_later(key, again)
            finally:
                metrics.reconcile_duration_seconds.labels(kind=key.kind).observe(time.monotonic() - started)
                self._count_writes()

    def _count_writes(self) -> None:
        """Count what was written since this was last called."""
        num_writes = self._kube.num_writes
        metrics.api_writes_total.inc(num_writes - self._num_writes_counted)
        self._num_writes_counted = num_writes

    async def _repeat(self, task: str, step: Callable[[], Awaitable[float]]) -> NoReturn:
        """Take the step again and again, after as many seconds as it returns; one that fails ends nothing but itself.

        Raises:
            NotLeader: the lease is lost.
        """
        while True:
            try:
                wait = await step()
            except NotLeader:
                raise
            except Exception as error:  # noqa: BLE001 -- whatever it met, the others' work and the next try go on
                wait = RETRY_SECONDS
                metrics.reconcile_errors_total.labels(kind=task).inc()
                note_failure(task, task, error, wait)
            await asyncio.sleep(wait)

    async def _look_after_webhook(self, pools: PoolReconciler, owner: dict[str, str]) -> None:
        def say(health: InjectionHealth) -> None:
            metrics.injection_ready.set(health.is_serving)
            if health != pools.injection:
                pools.injection = health
                self._on_dirty(Dirty(pools=frozenset(self._view.pools)))

        async def look() -> float:
            try:
                health, wait = await look_after_webhook(self._kube, self._settings, owner, datetime.now(UTC))
            except KVOffloadError:
                raise  # no answer is no news of the webhook
            except Exception as error:
                say(unknown_injection(error))
                raise
            say(health)
            return wait

        await self._repeat("webhook", look)

    async def _sweep_forever(self, pods: PodReconciler) -> None:
        """Count the pods that run without offload; the events are each pod's own pass."""

        async def sweep() -> float:
            counts = pods.count_unattached(datetime.now(UTC))
            for reason in UNATTACHED_REASONS:
                metrics.unattached_pods.labels(reason=reason).set(counts[reason])
            self._export_pools()
            self._count_writes()
            return SWEEP_SECONDS

        await self._synced.wait()
        await self._repeat("sweep", sweep)

    def _export_pools(self) -> None:
        """Export mode, node counts and degradations of every pool; what is gone is no longer shown."""
        metrics.pool_nodes.clear()
        metrics.pool_active.clear()
        metrics.pool_degraded.clear()
        for pool in self._view.pools.values():
            regions = self._view.regions_of(pool.name).values()
            for reason, count in count_degradations(pool.status, regions).items():
                metrics.pool_degraded.labels(pool=pool.name, reason=reason).set(count)
            for state, count in pool.status.nodes.model_dump().items():
                metrics.pool_nodes.labels(pool=pool.name, state=state).set(count)
            if pool.spec is not None:
                metrics.pool_active.labels(pool=pool.name).set(pool.spec.mode is Mode.ACTIVE)


def note_failure(task: str, subject: str, error: Exception, delay_seconds: float) -> None:
    """Log what a task met; what it does not expect, with its traceback and counted."""
    if isinstance(error, KVOffloadError | TimeoutError):
        logger.warning("%s: %s; again in %.1f s", subject, error, delay_seconds)
        return
    metrics.unexpected_errors_total.labels(task=task).inc()
    words = f"{type(error).__name__}: {error}"
    logger.error("%s: unexpected %.500s; again in %.1f s", subject, words, delay_seconds, exc_info=error)


async def run_operator(settings: Settings) -> int:
    """Run one replica until its lease is lost; the exit status."""
    agent = f"kvoffload-operator/{settings.pod_name}"
    kube = await KubeClient.connect(user_agent=agent)
    times = LeaseTimes(
        lease=settings.lease_seconds,
        renew_deadline=settings.renew_deadline_seconds,
        retry=settings.lease_retry_seconds,
    )

    async def connect() -> KubeClient:
        # renewing must not wait behind a thousand writes
        return await KubeClient.connect(
            user_agent=agent, timeout_seconds=settings.renew_deadline_seconds / 3, attempts=1, connections=2
        )

    def make_election(lease_kube: KubeClient) -> Election:
        return Election(
            lease_kube,
            name=f"{settings.release}-operator",
            namespace=settings.namespace,
            identity=settings.pod_name,
            times=times,
        )

    try:
        await Operator(settings, kube, LeaseKeeper(connect, make_election)).run()
    finally:
        await kube.close()
    return 1
