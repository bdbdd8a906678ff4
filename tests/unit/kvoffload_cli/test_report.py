"""`kubectl kvoffload report`: what is in the bundle, and what of others never is."""

import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fixtures.cli.marked import (
    DAEMON_POD,
    MARKER,
    OPERATOR_POD,
    POD,
    daemon_pod,
    objects,
    operator_pod,
)
from fixtures.cli.pods import node
from fixtures.cli.reader import FixtureReader
from fixtures.cli.release import CERTIFICATE
from fixtures.cli.scene import GPU, NOW, SYSTEM, Object
from kvoffload.api import keys
from kvoffload.errors import InvalidSpec
from kvoffload_cli import report
from kvoffload_cli.__main__ import app
from kvoffload_cli.bundle import contents, parts, texts
from kvoffload_cli.bundle.archive import write_zip, writing_whole
from kvoffload_cli.bundle.contents import gather
from kvoffload_cli.bundle.once import OnceReader
from kvoffload_cli.kube import ClusterUnavailable, Denied, ReadFailed
from kvoffload_cli.observe import NODES, PODS, PROBE_PATH, observe_cluster
from kvoffload_operator.events import CONTROLLER


class Watched(FixtureReader):
    """Remembers what it was asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: list[tuple[str, ...]] = []
        self.logs: list[dict[str, str]] = []

    def list_objects(self, path: str, *, labels: str = "", fields: str = "") -> list[Object]:
        self.read.append((path, labels, fields))
        return super().list_objects(path, labels=labels, fields=fields)

    def get(self, path: str) -> Object | None:
        self.read.append((path,))
        return super().get(path)

    def text(self, path: str, *, query: Any = None) -> str:
        if path.endswith("/log"):
            self.logs.append(dict(query))
        else:
            self.read.append((path,))
        return super().text(path, query=query)


def texts_of(bundle: parts.Bundle) -> dict[str, str]:
    return {name: one if isinstance(one, str) else json.dumps(one, default=str) for name, one in bundle.entries.items()}


def test_the_bundle_has_every_part(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    bundle = gather(FixtureReader(objects()), now=NOW)
    assert bundle.failures == []
    assert bundle.left_out == []
    assert {one["metadata"]["name"] for one in bundle.entries["workloads.json"]} == {
        *("kvoffload-operator", "kvoffload-webhook-0", "kvoffload-llm"),
    }
    assert [one["name"] for one in bundle.entries["engine-pods.json"]] == ["vllm-a", "vllm-b"]
    assert bundle.entries["engine-pods.json"][0]["environment"] == {"vllm": {"KVOFFLOAD_POOL": "llm"}}
    assert bundle.entries["engine-pods.json"][0]["annotations"][keys.INJECTED_ANNOTATION] == "0.1.0"
    assert [one["involvedObject"]["name"] for one in bundle.entries["events.json"]] == [
        *("vllm-gone", "kvoffload-operator-5d4f", DAEMON_POD),
    ]
    (configuration,) = bundle.entries["webhook-configurations.json"]
    (authority,) = configuration["webhooks"][0]["authorities"]
    assert authority["subject"] == "CN=kvoffload webhook CA"
    assert bundle.entries["doctor.json"]["findings"] == []
    with writing_whole(tmp_path / "x.zip", force=False) as stream:
        sizes = write_zip(stream, bundle.entries.items(), folder="x", now=NOW)
    console = Console(width=160, highlight=False)
    with console.capture() as capture:  # bytes of a golden file would change with every certificate
        report.render(console, bundle, dict.fromkeys(sizes, 1), Path("x.zip"))
    golden("report.txt", capture.get())


def test_nothing_of_others_is_in_it() -> None:
    reader = FixtureReader(objects())
    assert MARKER in json.dumps(reader.objects)
    assert [name for name, text in texts_of(gather(reader, now=NOW)).items() if MARKER in text] == []


@pytest.mark.parametrize("read", [gather, observe_cluster])
def test_no_secret_is_read(read: Callable[..., object]) -> None:
    reader = Watched(objects())
    read(reader, now=NOW)
    assert [asked for asked in reader.read if "secrets" in asked[0]] == []
    assert CERTIFICATE in {asked[0] for asked in reader.read}, "and yet the certificate is judged"


def test_of_a_nodes_labels_those_that_pools_select_by_and_ours_are_kept() -> None:
    found = objects()
    ours = {"kvoffload.io/node": "1", "node.kvoffload.io/llm": "ready"}
    others = {"owner.example.com/team": MARKER, "notkvoffload.io/x": MARKER, "app.kubernetes.io/name": MARKER}
    found[NODES] = [node("gpu-1", labels=GPU | ours | others)]
    (kept,) = gather(FixtureReader(found), now=NOW).entries["nodes.json"]
    assert kept["labels"] == GPU | ours
    assert kept["name"] == "gpu-1"
    assert kept["pages"]["2Mi"]["allocatable_bytes"] == 64 << 30


@pytest.mark.parametrize("failing", [(), (NODES,)])
def test_a_report_asks_for_each_thing_once(failing: tuple[str, ...]) -> None:
    """So doctor's findings and the files are of the same objects, and of the same failure."""
    reader = Watched(objects(), failing=failing)
    bundle = gather(reader, now=NOW)
    assert sorted(reader.read) == sorted(set(reader.read))
    assert [what for what, _ in bundle.failures] == list(failing)


def test_what_was_read_once_or_refused_once_is_so_to_everybody() -> None:
    reader = Watched(objects(), denied=(PODS,), failing=("/version",))
    once = OnceReader(reader)
    for _ in range(2):
        with pytest.raises(Denied, match="403"):
            once.list_objects(PODS)
        with pytest.raises(ReadFailed, match="500"):
            once.get("/version")
        assert once.get("/nothing") is None
    nodes = once.list_objects(NODES)
    reader.objects[NODES] = []
    assert once.list_objects(NODES) == nodes != []
    assert once.list_objects(NODES, labels="no-such-label") == [], "another question has another answer"
    assert once.list_objects(NODES, fields="kind=none") == []
    assert sorted(reader.read) == sorted(set(reader.read))


def test_what_cannot_be_read_is_said_and_the_rest_is_there() -> None:
    log = f"{POD}/{DAEMON_POD}/log"
    bundle = gather(FixtureReader(objects(), denied=(log,), failing=("/api/v1/nodes",)), now=NOW)
    assert {one["what"] for one in bundle.entries["not-read.json"]} == {
        "/api/v1/nodes",
        *(f"logs/{SYSTEM}/{DAEMON_POD}/{run}.log" for run in ("daemon", "daemon.previous", "attacher")),
    }
    assert all("403" in one["reason"] or "500" in one["reason"] for one in bundle.entries["not-read.json"])
    assert f"logs/{SYSTEM}/{OPERATOR_POD}/operator.log" in bundle.entries


def test_who_may_create_no_pod_has_read_everything_all_the_same() -> None:
    bundle = gather(FixtureReader(objects(), denied=(PROBE_PATH,)), now=NOW)
    assert bundle.failures == []
    assert any(PROBE_PATH in one for one in bundle.entries["doctor.json"]["notChecked"])


def test_names_are_replaced_by_the_same_word_everywhere() -> None:
    bundle = gather(FixtureReader(objects()), now=NOW, redacts=True)
    joined = "\n".join(texts_of(bundle).values()).replace("uid-vllm-", "uid-")
    for name in (
        "team-a",
        "vllm-a",
        "vllm-b",
        "vllm-old",
        "vllm-gone",
        '"gpu-1"',
        "llm.gpu-1",
        "moved-away",
        "long-ago",
        "vllm-zz",
    ):
        assert name not in joined, name
    engine = bundle.entries["engine-pods.json"][0]
    log = bundle.entries[f"logs/{SYSTEM}/{DAEMON_POD}/daemon.log"]
    assert log.startswith(f"daemon: {engine['namespace']}/{engine['name']} and {engine['namespace']}/pod-")
    assert log.endswith(f" on {engine['node']}\n")
    assert bundle.entries["regions.json"][0]["metadata"]["name"] == f"llm.{engine['node']}"
    assert f'tenant="namespace/{engine["namespace"]}"' in joined.replace('\\"', '"')
    assert SYSTEM in joined
    again = gather(FixtureReader(objects()), now=NOW, redacts=True)
    assert again.entries["engine-pods.json"][0]["name"] != engine["name"], "nobody can look up a name by its hash"


def test_logs_are_left_out_where_that_is_asked() -> None:
    bundle = gather(FixtureReader(objects()), now=NOW, with_logs=False)
    assert not [name for name in bundle.entries if name.startswith("logs/")]
    assert [name for name in bundle.entries if name.startswith("metrics/")]


def test_those_in_trouble_come_first_and_the_few_before_the_many() -> None:
    def of(name: str, *, restarts: int = 0, ready: bool = True, is_daemon: bool = True) -> Object:
        one = daemon_pod("gpu-1", restarts=restarts) if is_daemon else operator_pod()
        one["metadata"]["name"] = name
        one["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]
        return one

    pods = [
        of("a-well"),
        of("b-well"),
        of("u-restarted", restarts=1),
        of("v-restarted", restarts=9),
        of("w-starting", ready=False),
        of("x-stuck", ready=False, restarts=2),
        of("y-operator", is_daemon=False),
        of("z-operator", is_daemon=False, ready=False),
    ]
    assert [one["metadata"]["name"] for one in sorted(pods, key=texts.urgency)] == [
        *("z-operator", "y-operator"),
        *("x-stuck", "w-starting"),
        *("v-restarted", "u-restarted"),
        *("a-well", "b-well"),
    ]


def test_bounds_hold_and_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_OBJECTS", 1)
    monkeypatch.setattr(texts, "MAX_PODS", 3)
    monkeypatch.setattr(parts, "MAX_TEXT_BYTES", 40)
    bundle = gather(FixtureReader(objects()), now=NOW)
    assert len(bundle.entries["pods.json"]) == 1
    with_logs = {name.split("/")[2] for name in bundle.entries if name.startswith("logs/")}
    assert with_logs == {OPERATOR_POD, DAEMON_POD}, "the operator, and the daemon that was restarted"
    assert len(bundle.entries[f"metrics/{SYSTEM}/{DAEMON_POD}.txt"]) == 40
    assert {one.partition(":")[0] for one in bundle.left_out} >= {"pods.json", "logs and metrics"}
    assert bundle.entries["summary.json"]["leftOut"] == bundle.left_out


def test_of_a_log_that_is_too_long_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {number}\n" for number in range(6000)]

    class Log(FixtureReader):
        def text(self, path: str, *, query: Any = None) -> str:
            return "".join(lines[-int(query["tailLines"]) :])[: int(query["limitBytes"])]

    monkeypatch.setattr(texts, "MAX_TEXT_BYTES", 20_000)
    text, num_lines = texts.read_tail(Log({}), "path", {})
    assert (text.splitlines()[-1], num_lines) == ("line 5999", 500)


def test_an_api_server_that_is_away_ends_it() -> None:
    class Away(FixtureReader):
        def list_objects(self, path: str, *, labels: str = "", fields: str = "") -> list[Object]:
            raise ClusterUnavailable("no answer")

    with pytest.raises(ClusterUnavailable):
        gather(Away({}), now=NOW)


def test_the_file_is_whole_private_and_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "x.zip"
    before = os.umask(0)
    try:
        with writing_whole(target, force=False) as stream:
            write_zip(stream, [("a.json", {"a": 1}), ("b.txt", "b")], folder="x", now=NOW)
            assert not target.exists()
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with zipfile.ZipFile(target) as archive:
        assert archive.namelist() == ["x/a.json", "x/b.txt"]
        assert archive.testzip() is None
    with pytest.raises(InvalidSpec, match="is there already"), writing_whole(target, force=False):
        pass
    with writing_whole(target, force=True) as stream:
        stream.write(b"new")
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_that_came_meanwhile_is_left(tmp_path: Path) -> None:
    target = tmp_path / "x.zip"
    writing = writing_whole(target, force=False)
    writing.__enter__().write(b"mine")
    target.write_bytes(b"theirs")
    with pytest.raises(InvalidSpec, match="File exists"):
        writing.__exit__(None, None, None)
    assert target.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_what_ends_early_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writing_whole(tmp_path / "x.zip", force=False):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidSpec, match="cannot write into"), writing_whole(tmp_path / "no" / "x.zip", force=False):
        pass


@pytest.mark.parametrize(("text", "seconds"), [("", 0), ("90s", 90), ("15m", 900), ("1h", 3600), ("2d", 172800)])
def test_since_is_a_time(text: str, seconds: int) -> None:
    assert report.parse_since(text) == seconds


@pytest.mark.parametrize("text", ["1", "h", "0h", "-1h", "1.5h", "1w", "1h30m"])
def test_since_is_refused_where_it_is_none(text: str) -> None:
    with pytest.raises(InvalidSpec, match="write 90s, 15m, 1h or 2d"):
        report.parse_since(text)


@pytest.mark.parametrize(("arguments", "seconds"), [(["--since", "15m"], "900"), ([], None)])
def test_since_reaches_every_request_for_a_log(
    arguments: list[str], seconds: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader = Watched(objects())
    monkeypatch.setattr(report, "ClusterReader", lambda **_: reader)
    done = CliRunner().invoke(app, ["report", "-f", str(tmp_path / "r.zip"), *arguments])
    assert (done.exit_code, done.exception) == (0, None)
    assert [query.get("sinceSeconds") for query in reader.logs] == [seconds] * 6
    assert [query["container"] for query in reader.logs if query.get("previous") == "true"] == ["daemon"]


def test_the_operators_component_is_that_of_its_events() -> None:
    assert contents.OF_OPERATOR.partition("=")[2] == CONTROLLER
