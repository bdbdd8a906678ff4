"""The daemon's pod on the real node: two containers with only what each needs, and a roll that loses nothing."""

import pytest

from e2e.daemon_pod import ContainerView

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

LEAST_CACHED_TOKENS = 256  # of 300: all whole blocks but the last


@pytest.fixture
def containers(demo_result) -> dict[str, ContainerView]:
    return demo_result.containers


def test_each_container_sees_what_it_needs_and_nothing_of_the_others(containers: dict[str, ContainerView]) -> None:
    assert set(containers) == {"daemon", "attacher"}
    ours = {name: set(view.mounts) & {"/hugepages", "/state", "/kubelet-pods"} for name, view in containers.items()}
    assert ours == {"daemon": {"/hugepages", "/state"}, "attacher": {"/kubelet-pods"}}
    for view in containers.values():
        assert "/handoff" in view.mounts


def test_both_run_as_root_without_capabilities_on_a_read_only_root(containers: dict[str, ContainerView]) -> None:
    for view in containers.values():
        assert view.status["Uid"].split() == ["0"] * 4
        assert {int(view.status[kind], 16) for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert view.status["NoNewPrivs"] == "1"
        assert view.status["Seccomp"] == "2", "a filter, of RuntimeDefault"
        assert "ro" in view.mounts["/"]


def test_a_rolled_daemon_keeps_every_ready_chunk_and_gets_its_engines_back(demo_result) -> None:
    roll = demo_result.roll
    assert roll.errors == []
    assert roll.answers_meanwhile > 0
    assert roll.ready_after >= roll.ready_before > 0
    assert min(answer.cached_tokens for answer in roll.warm_after) >= LEAST_CACHED_TOKENS
    assert roll.hits_after > 0, "the chunks were found by the new daemon, not in the engine's own cache"
    warm = [answer.text_tokens for answer in demo_result.shared.warm_a]
    assert [answer.text_tokens for answer in roll.warm_after] == warm
