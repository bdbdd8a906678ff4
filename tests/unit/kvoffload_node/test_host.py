"""What the node has, read from fixture trees: pages, limits, NUMA nodes."""

from pathlib import Path

import pytest

from kvoffload.api.pool import NumaPolicy
from kvoffload_node.host.hugepages import explain_shortage, read_hugepage_limit, read_hugepages
from kvoffload_node.host.numa import NumaNode, parse_cpu_list, plan_node, read_numa_nodes
from kvoffload_node.host.paths import HostPaths

TREES = Path(__file__).parents[2] / "fixtures/sysfs"
TWO = HostPaths.below(TREES / "two-nodes-v2")
EIGHT = HostPaths.below(TREES / "eight-nodes-v1")
NONE = HostPaths.below(TREES / "no-pages")
MIB = 1 << 20
PAGE_2M = 2 * MIB
PAGE_1G = 1 << 30


def test_pages_that_are_promised_to_somebody_are_not_available() -> None:
    counts = read_hugepages(TWO, PAGE_2M)
    assert counts is not None
    assert (counts.total, counts.free, counts.available) == (512, 300, 280)


def test_a_page_size_that_the_node_lacks_is_none() -> None:
    assert read_hugepages(TWO, PAGE_1G) is None
    assert read_hugepages(NONE, PAGE_2M) is None


def test_the_tightest_limit_counts_in_cgroup_v2_and_v1() -> None:
    two, eight = read_hugepage_limit(TWO, PAGE_2M), read_hugepage_limit(EIGHT, PAGE_1G)
    assert two is not None
    assert (two.limit_bytes, two.used_bytes) == (256 * MIB, 64 * MIB)
    assert eight is not None
    assert eight.limit_bytes == 32 << 30


def test_without_the_hugetlb_controller_there_is_no_limit() -> None:
    assert read_hugepage_limit(NONE, PAGE_2M) is None


def test_case_21_a_shortage_is_told_with_asked_free_and_limit_and_the_remedy() -> None:
    reason, message = explain_shortage(TWO, wanted_bytes=1024 * MIB, page_bytes=PAGE_2M)
    assert reason == "PagesUnavailable"
    for number in ("1Gi", "560Mi", "256Mi", "reserve 232 more pages", "|| n=744;"):
        assert number in message


def test_case_21_a_cgroup_limit_below_free_pages_is_named_as_the_reason() -> None:
    reason, message = explain_shortage(TWO, wanted_bytes=512 * MIB, page_bytes=PAGE_2M)
    assert reason == "CgroupLimit"
    assert "256Mi" in message
    assert "64Mi are used" in message


def test_case_21_without_the_controller_the_message_says_so() -> None:
    reason, message = explain_shortage(NONE, wanted_bytes=512 * MIB, page_bytes=PAGE_2M)
    assert reason == "PagesUnavailable"
    assert "no cgroup limit" in message
    assert "reserve 256 more pages" in message


def test_cpu_lists_are_read_as_the_kernel_writes_them() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("\n") == frozenset()


def test_nodes_without_cpus_are_left_out_and_order_is_by_number() -> None:
    assert [node.number for node in read_numa_nodes(EIGHT, PAGE_1G)] == list(range(8))
    assert [(n.number, n.free_pages, len(n.cpus)) for n in read_numa_nodes(TWO, PAGE_2M)] == [(0, 200, 8), (1, 100, 8)]


def place(policy: NumaPolicy, nodes: list[NumaNode], count: int, pages_per_extent: int) -> list[int]:
    """Nodes of the first `count` extents, with the pages that each takes."""
    given: dict[int, int] = {}
    placed = []
    free = {node.number: node.free_pages for node in nodes}
    for _ in range(count):
        now = [NumaNode(node.number, node.cpus, free[node.number]) for node in nodes]
        node = plan_node(policy, now, given, pages_per_extent)
        assert node is not None
        given[node.number] = given.get(node.number, 0) + 1
        free[node.number] -= pages_per_extent
        placed.append(node.number)
    return placed


def test_interleave_goes_round_all_nodes() -> None:
    assert place(NumaPolicy.INTERLEAVE, read_numa_nodes(EIGHT, PAGE_1G), 16, 1) == [*range(8), *range(8)]


def test_interleave_passes_over_a_node_that_is_full() -> None:
    placed = place(NumaPolicy.INTERLEAVE, read_numa_nodes(TWO, PAGE_2M), 9, 32)
    assert placed.count(1) == 3
    assert placed.count(0) == 6


def test_local_fills_one_node_before_the_next() -> None:
    assert place(NumaPolicy.LOCAL, read_numa_nodes(TWO, PAGE_2M), 9, 32) == [0] * 6 + [1] * 3


def test_one_node_needs_no_plan() -> None:
    assert plan_node(NumaPolicy.INTERLEAVE, read_numa_nodes(NONE, PAGE_2M), {}, 1) is None


@pytest.mark.parametrize("policy", list(NumaPolicy))
def test_where_no_node_can_hold_an_extent_one_is_named_all_the_same(policy: NumaPolicy) -> None:
    assert plan_node(policy, read_numa_nodes(TWO, PAGE_2M), {}, 1000) is not None
