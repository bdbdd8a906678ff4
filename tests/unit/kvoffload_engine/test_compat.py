"""What differs between versions, on stubs of what each has; with the real classes: `tests/engine/compat_checks.py`."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload_engine import compat


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [({"compress_ratio": 4}, 4), ({"tokens_per_state": 4}, 4), ({"tokens_per_state": -1}, -1), ({}, 1)],
    ids=["0.28", "0.29 and newer", "Mamba", "neither"],
)
def test_a_compressed_state_is_known_by_the_versions_own_name(spec: dict[str, int], tokens: int) -> None:
    assert compat.tokens_per_state(SimpleNamespace(**spec)) == tokens


@pytest.mark.parametrize(
    ("cache", "tokens"),
    [
        ({"prefix_match_unit": None}, 0),
        ({"prefix_match_unit": 32}, 32),
        ({"prefix_match_unit": 32, "hash_block_size": 64}, 64),
        ({"prefix_match_unit": 32, "hash_block_size": None}, 0),
    ],
    ids=["up to 0.31", "up to 0.31, as the user says", "0.32 and newer", "not told"],
)
def test_the_tokens_of_a_hash_are_what_the_worker_is_told(cache: dict[str, Any], tokens: int) -> None:
    assert compat.tokens_per_hash(SimpleNamespace(**cache)) == tokens


def test_hisparse_is_known_where_the_version_has_it() -> None:
    for attention, has in (({}, False), ({"hisparse_config": None}, False), ({"hisparse_config": object()}, True)):
        config = SimpleNamespace(attention_config=SimpleNamespace(**attention))
        assert compat.has_host_resident_cache(config) is has
