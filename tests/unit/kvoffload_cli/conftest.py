"""Golden files of the command line, without the spaces that a table leaves at the end of its lines."""

from collections.abc import Callable

import pytest

from golden_files import assert_golden


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    def compare(name: str, text: str) -> None:
        assert_golden("\n".join(line.rstrip() for line in text.splitlines()) + "\n", f"cli/{name}")

    return compare
