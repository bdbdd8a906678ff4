"""Completion as kubectl asks for it."""

import json
import socket
from pathlib import Path

import pytest

from fixtures.cli.cluster import healthy
from fixtures.cli.pods import pod
from fixtures.cli.reader import FixtureReader
from kvoffload_cli import completion
from kvoffload_cli.completion import DEFAULT, NO_FILES, complete
from kvoffload_cli.kube import ClusterReader, ClusterUnavailable
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


class ContextReader(FixtureReader):
    """The fixture as ClusterReader makes it: of a context, whose namespace is team-a."""

    namespace = "team-a"

    def __init__(self, **given: object) -> None:
        objects = healthy()
        objects["/api/v1/pods"] += [pod("other", namespace="team-b"), pod("bare", labels={}, injected=False)]
        super().__init__(objects)
        assert given == {"timeout_seconds": completion.PATIENCE_SECONDS, "context": "second"}


@pytest.mark.parametrize(
    ("words", "proposals"),
    [
        (["explain", "pod", "--context", "second", ""], ["vllm-a", "vllm-b"]),
        (["explain", "pod", "--context", "second", "vllm-b"], ["vllm-b"]),
        (["explain", "pod", "--context=second", "vllm-b"], ["vllm-b"]),
        (["explain", "pod", "--context", "second", "team-b/"], ["team-b/other"]),
        (["explain", "pod", "--context", "second", "-n", "team-b", ""], ["other"]),
        (["status", "--context", "second", "l"], ["llm"]),
    ],
)
def test_arguments_are_proposed_out_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, words: list[str], proposals: list[str]
) -> None:
    monkeypatch.setattr(completion, "ClusterReader", ContextReader)
    assert complete(words) == (proposals, NO_FILES)


def test_nothing_is_proposed_and_nothing_said_without_a_cluster(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert complete(["explain", "pod", "--kubeconfig", str(tmp_path / "none"), ""]) == ([], NO_FILES)
    assert capfd.readouterr() == ("", "")


def test_an_api_server_that_says_nothing_is_asked_once(tmp_path: Path) -> None:
    """As often again would take four times as long as whoever waits was told."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster = {"server": f"http://127.0.0.1:{server.getsockname()[1]}"}
        kubeconfig = {
            "clusters": [{"name": "c", "cluster": cluster}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
            "current-context": "c",
        }
        (tmp_path / "config").write_text(json.dumps(kubeconfig))
        reader = ClusterReader(kubeconfig=str(tmp_path / "config"), timeout_seconds=0.2)
        with pytest.raises(ClusterUnavailable):
            reader.get("/version")
        server.setblocking(False)
        server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()
