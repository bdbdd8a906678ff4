"""NUMA nodes of the host, and on which of them the next extent's pages belong.

Runs in the node daemon. `plan_node` is pure; the extent's thread then runs on that node's CPUs while the kernel
allocates, which prefers their memory. Where the node has no page left the kernel takes another one's: an extent is
never refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvoffload.api.pool import NumaPolicy
from kvoffload_node.host.paths import HostPaths


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
