"""`kubectl kvoffload status`: pools, their nodes, and the engines on them."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from kvoffload.api.conditions import PoolCondition, RegionCondition, find
from kvoffload.api.keys import APPLY_CRDS_COMMAND
from kvoffload.api.pool import KVOffloadPool
from kvoffload.api.region import ConfirmedLayout, KVOffloadRegion, RegionEngine
from kvoffload.errors import InvalidSpec
from kvoffload.units import format_bytes
from kvoffload_cli.facts import ClusterFacts, Part
from kvoffload_cli.kube import ClusterReader, ClusterUnavailable
from kvoffload_cli.observe import observe_status
from kvoffload_cli.options import Context, Kubeconfig, Output
from kvoffload_cli.output import OutputFormat, escape, make_console, make_table, print_json, show_bytes

UNKNOWN = "-"
POOL_COLUMNS = ("POOL", "READY", "MODE", "NODES", "PER NODE", "CAPACITY", "USED", "SAVED", "ENGINES", "REPLICATED")
REGION_COLUMNS = ("NODE", "POOL", "READY", "CAPACITY", "USED", "FREE", "SAVED", "ENGINES", "DAEMON", "EPOCH")
ENGINE_COLUMNS = ("POD", "NODE", "ENGINE", "MODEL", "TP", "LAYOUT", "STORED", "LOADED")


def command(
    pool: Annotated[str, typer.Argument(help="Only this pool; default: all.")] = "",
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    output: Output = OutputFormat.TEXT,
) -> None:
    """Show pools, nodes and engines.

    What is held, what is saved, what is not ready and why. Status 1 if only a part of it could be read.
    """
    facts = observe_status(ClusterReader(kubeconfig=kubeconfig, context=context), now=datetime.now(UTC))
    require_pools(facts)
    pools = select(facts, pool)
    console = make_console()
    if output is OutputFormat.JSON:
        print_json(console, as_document(facts, pools))
    else:
        render(console, facts, pools)
    raise typer.Exit(exit_status(facts))


def exit_status(facts: ClusterFacts) -> int:
    """1 where regions, or an object that this version does not know, could not be read."""
    return 1 if facts.unreadable or facts.invalid else 0


def require_pools(facts: ClusterFacts) -> None:
    """Raises ClusterUnavailable where nothing can be said of pools: they may not be read, or there is no such kind."""
    if Part.POOLS in facts.unread:
        ask = f"ask an administrator for the ClusterRole {facts.viewer_role}"
        raise ClusterUnavailable(f"{facts.unreadable[0]}; {ask}, where it is a lack of rights")
    if not facts.serves_pools:
        raise ClusterUnavailable(
            "the cluster has no kind KVOffloadPool: its CRDs are not installed; helm install kvoffload "
            f"charts/kvoffload brings them, and so does, in a clone, {APPLY_CRDS_COMMAND}"
        )


def select(facts: ClusterFacts, name: str) -> list[KVOffloadPool]:
    """All pools, or the one of that name."""
    if not name:
        return list(facts.pools)
    pool = facts.pool(name)
    if pool is None:
        names = ", ".join(one.name for one in facts.pools) or "none"
        raise InvalidSpec(f"no KVOffloadPool {name!r}; there are: {names}")
    return [pool]


def regions_of(facts: ClusterFacts, pool: KVOffloadPool) -> list[KVOffloadRegion]:
    """The pool's regions in order of their nodes."""
    return sorted((one for one in facts.regions if one.spec.pool_name == pool.name), key=lambda one: one.spec.node_name)


def as_document(facts: ClusterFacts, pools: list[KVOffloadPool]) -> dict[str, Any]:
    """The API objects' own fields, by pool."""
    return {
        "pools": [
            {
                "name": pool.name,
                "spec": pool.spec.to_manifest(),
                "status": pool.status.to_manifest(),
                "regions": [
                    {"name": region.name, "node": region.spec.node_name, "status": region.status.to_manifest()}
                    for region in regions_of(facts, pool)
                ],
            }
            for pool in pools
        ],
        "operatorRuns": facts.operator_runs,
        "notRead": [*facts.unreadable, *facts.invalid],
    }


def render(console: Console, facts: ClusterFacts, pools: list[KVOffloadPool]) -> None:
    """Print the tables for people."""
    for sentence in (*facts.unreadable, *facts.invalid):
        console.print(f"not read: {escape(sentence)}", soft_wrap=True)
    if not pools:
        console.print("no KVOffloadPool; `kubectl kvoffload plan` prints one for your model")
        return
    if facts.operator_runs is False:
        console.print(f"no operator runs: nobody keeps this up to date, it is as of {as_of(facts)}", soft_wrap=True)
        console.print("`kubectl kvoffload doctor` says what is missing", soft_wrap=True)
    console.print(make_table(*POOL_COLUMNS, rows=[pool_row(facts, pool) for pool in pools]))
    for pool in pools:
        for condition in pool.status.conditions:
            if condition.status != ("False" if condition.type == PoolCondition.DEGRADED else "True"):
                console.print(
                    escape(
                        f"{pool.name}: {condition.type} {condition.status}: {condition.reason}: {condition.message}"
                    ),
                    soft_wrap=True,
                )
    regions = [region for pool in pools for region in regions_of(facts, pool)]
    if regions:
        console.print()
        console.print(make_table(*REGION_COLUMNS, rows=[region_row(region) for region in regions]))
    engines = [engine_row for region in regions for engine_row in engine_rows(region)]
    if engines:
        console.print()
        console.print(make_table(*ENGINE_COLUMNS, rows=engines))


def as_of(facts: ClusterFacts) -> str:
    """When the status of a pool was written last."""
    times = [time for name, time in facts.reported_at.items() if facts.pool(name)]
    return f"{max(times):%Y-%m-%d %H:%M:%S} UTC" if times else "the operator's last pass"


def pool_row(facts: ClusterFacts, pool: KVOffloadPool) -> list[str]:
    """One pool."""
    status, nodes = pool.status, pool.status.nodes
    return [
        pool.name,
        "Unknown (no operator)" if facts.operator_runs is False else condition_text(pool, PoolCondition.READY),
        pool.spec.mode.value,
        f"{nodes.ready}/{nodes.matching}",
        f"{format_bytes(pool.spec.capacity)} ({pool.spec.page_size.value})",
        show_bytes(status.capacity_bytes),
        show_bytes(status.used_bytes),
        show_bytes(status.saved_bytes),
        str(status.engines.attached),
        str(status.engines.replicated),
    ]


def region_row(region: KVOffloadRegion) -> list[str]:
    """One node of a pool."""
    status = region.status
    return [
        region.spec.node_name,
        region.spec.pool_name,
        condition_text(region, RegionCondition.READY),
        show_bytes(status.capacity_bytes),
        show_bytes(status.used_bytes),
        show_bytes(status.free_bytes),
        show_bytes(status.saved_bytes),
        str(status.engines_attached),
        status.daemon_version or UNKNOWN,
        str(status.epoch),
    ]


def engine_rows(region: KVOffloadRegion) -> list[list[str]]:
    """The engines of a region."""
    return [
        [
            f"{engine.pod_namespace}/{engine.pod_name}",
            region.spec.node_name,
            engine.engine_id,
            engine.model or UNKNOWN,
            UNKNOWN if engine.is_left_alone else str(engine.tensor_parallel_size),
            layout_text(engine),
            show_bytes(engine.stored_bytes),
            show_bytes(engine.loaded_bytes),
        ]
        for engine in region.status.engines
    ]


def layout_text(engine: RegionEngine) -> str:
    """The confirmed layout, with the reason where it is not the shared one."""
    if engine.is_left_alone:
        return f"without offload ({engine.message.partition(':')[0]})"
    if not engine.confirmed_layout:
        return "waiting for its ranks"
    if engine.confirmed_layout == ConfirmedLayout.REPLICATED or not engine.reason:
        return engine.confirmed_layout
    return f"{engine.confirmed_layout} ({engine.reason})"


def condition_text(one: KVOffloadPool | KVOffloadRegion, kind: str) -> str:
    """`True`, or the status and the reason."""
    condition = find(one.status.conditions, kind)
    if condition is None:
        return "Unknown"
    return condition.status if condition.status == "True" else f"{condition.status} ({condition.reason})"
