"""What pods may hold of the daemon's memory."""

from kvoffload_node.session.memory import Budget


def test_a_pod_may_hold_its_limit_while_all_together_hold_little() -> None:
    assert Budget(max_of_pod=32, max_of_all=256, total=256).allowed(num_pods=110) == 32


def test_where_all_together_hold_too_much_only_those_above_an_equal_share_are_over_it() -> None:
    budget = Budget(max_of_pod=32, max_of_all=256, total=257)
    assert budget.allowed(num_pods=16) == 16
    assert budget.allowed(num_pods=2) == 32
    assert budget.allowed(num_pods=0) == 32
