"""NUMA nodes of the host, and on which of them the next extent's pages belong.

Runs in the node daemon. `plan_node` is pure; the extent's thread then is `running_on` that node's CPUs while the
kernel allocates, which prefers their memory. Where the node has no page left the kernel takes another one's: an extent
is never refused.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from kvoffload.api.pool import NumaPolicy
from kvoffload_node.host.paths import HostPaths

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One node with CPUs."""

    number: int
    cpus: frozenset[int]
    free_pages: int
    """Free huge pages of the pool's size."""


def read_numa_nodes(paths: HostPaths, page_bytes: int) -> list[NumaNode]:
    """The nodes that have CPUs, in order; empty where the kernel shows none."""
    nodes = []
    for folder in sorted(paths.sys.glob("devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        cpus = parse_cpu_list((folder / "cpulist").read_text())
        pages = folder / f"hugepages/hugepages-{page_bytes >> 10}kB/free_hugepages"
        if cpus:
            nodes.append(NumaNode(int(folder.name[4:]), cpus, int(pages.read_text()) if pages.exists() else 0))
    return nodes


def read_allowed_cpus(paths: HostPaths) -> frozenset[int] | None:
    """CPUs that this process may run on: its container may have fewer than the host. None: the kernel does not say."""
    try:
        lines = (paths.proc / "self/status").read_text().splitlines()
    except FileNotFoundError:
        return None
    return next(
        (parse_cpu_list(line.partition(":")[2]) for line in lines if line.startswith("Cpus_allowed_list")), None
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs of a kernel list such as `0-3,8,10-11`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def plan_node(
    policy: NumaPolicy, nodes: Sequence[NumaNode], num_extents: Mapping[int, int], pages_per_extent: int
) -> NumaNode | None:
    """The node for the next extent; None where it does not matter. `num_extents` is what each node has been given.

    Interleave: the node with the fewest extents. Local: the node that has been given extents already, until its pages
    are used up, then the one with the most. Nodes that cannot hold one more extent come last in both.
    """
    if len(nodes) < 2:
        return None
    fitting = [node for node in nodes if node.free_pages >= pages_per_extent] or list(nodes)
    if policy is NumaPolicy.INTERLEAVE:
        return min(fitting, key=lambda node: (num_extents.get(node.number, 0), node.number))
    return max(fitting, key=lambda node: (num_extents.get(node.number, 0), node.free_pages, -node.number))


@contextlib.contextmanager
def running_on(cpus: Set[int]) -> Iterator[None]:
    """This thread runs on these CPUs meanwhile, on any if none are given; mbind would need CAP_SYS_NICE.

    Where it may run on none of them (offline, or lost to the container) it stays where it is and says so.
    """
    before = os.sched_getaffinity(0)
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        log.warning(
            "an extent's pages come from any NUMA node: it belongs to that of CPU %d, where the daemon may not run: %s",
            min(cpus),
            error,
        )
    try:
        yield
    finally:
        if cpus:
            with contextlib.suppress(OSError):  # the container has other CPUs by now: the kernel moved the thread
                os.sched_setaffinity(0, before)
