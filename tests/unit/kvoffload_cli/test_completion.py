"""Completion as kubectl asks for it."""

import pytest

from kvoffload_cli.completion import DEFAULT, NO_FILES, complete
from kvoffload_cli.models import packaged_models


@pytest.mark.parametrize(
    ("words", "proposals", "directive"),
    [
        ([""], ["plan", "doctor", "status", "top", "report", "explain"], NO_FILES),
        ([], ["plan", "doctor", "status", "top", "report", "explain"], NO_FILES),
        (["do"], ["doctor"], NO_FILES),
        (["explain", ""], ["pod"], NO_FILES),
        (["doctor", "-o", ""], ["text", "json"], NO_FILES),
        (["doctor", "--output", "j"], ["json"], NO_FILES),
        (["plan", "--page-size", ""], ["2Mi", "1Gi"], NO_FILES),
        (["plan", "--model", ""], packaged_models(), NO_FILES),
        (["plan", "--node-m"], ["--node-memory"], NO_FILES),
        (["status", "--kubeconfig", ""], [], DEFAULT),
    ],
)
def test_proposals(words: list[str], proposals: list[str], directive: int) -> None:
    assert complete(words) == (proposals, directive)
