"""The engine's modules without vLLM, for tests of what its scheduler and its workers do."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine_without_vllm import engine_without_vllm


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    with engine_without_vllm(monkeypatch) as modules:
        yield modules
