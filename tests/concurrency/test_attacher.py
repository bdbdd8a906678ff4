"""The attacher on a kubelet's pods folder, beside a real daemon, with pods that behave and pods that do not."""

import contextlib
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from daemon_process import DaemonProcess, TestEngine, wait_until
from kvoffload.errors import DaemonUnavailable
from kvoffload_node.attach import folder as attach_folder
from toy_node import Node, running_node


@pytest.fixture
def node() -> Iterator[Node]:
    with running_node() as node:
        yield node


INFORMATION = "kvoffload_engine-0.1.0.dist-info"


def is_attached(folder: Path) -> bool:
    return (folder / INFORMATION).is_dir() and not (folder / INFORMATION).is_symlink()


def test_a_pod_gets_a_world_writable_socket_then_a_whole_library(node: Node) -> None:
    folder = node.create_pod("pod-a")
    wait_until(lambda: is_attached(folder))
    mode = (folder / "daemon.sock").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o666
    wait_until(lambda: list(folder.glob(".*")) == [])
    copied = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)) for path in copied} == {
        "kvoffload_engine/plugin.py",
        f"{INFORMATION}/METADATA",
        f"{INFORMATION}/entry_points.txt",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in copied} == {0o644}
    TestEngine(folder / "daemon.sock").close()


EARLY = """
import importlib.metadata
print("started", flush=True)
while not (found := importlib.metadata.entry_points(group="vllm.general_plugins")):
    try:
        import nothing_of_this_name
    except ImportError:
        pass
print(*(plugin.load().__module__ for plugin in found))
"""
"""A Python that looks into its path all the time, as vLLM's does with each import, until the plugin is there."""


def test_a_python_that_started_before_the_attacher_came_loads_the_plugin(node: Node) -> None:
    folders = [node.create_folder(f"pod-{number}") for number in range(8)]
    for folder in folders:
        with subprocess.Popen(
            [sys.executable, "-S", "-c", EARLY],
            env={"PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as python:
            assert python.stdout is not None
            assert python.stdout.readline() == "started\n"
            node.pods.tell_of(folder.parts[-4])
            assert python.communicate(timeout=30)[0] == "kvoffload_engine.plugin\n"


def test_110_pods_at_once_are_all_attached(node: Node) -> None:
    folders = [node.create_pod(f"pod-{number}") for number in range(110)]
    wait_until(lambda: all(is_attached(folder) for folder in folders))
    wait_until(lambda: node.attacher.num_attached == 110)  # the last library is there before it counts


def test_a_pod_that_a_silent_watch_never_told_of_is_found_by_its_folder(node: Node) -> None:
    folder = node.create_pod("pod-a", hidden=True)
    wait_until(lambda: is_attached(folder))
    assert node.pods.refreshed >= 1


def test_a_folder_of_a_pod_that_is_not_ours_stays_empty(node: Node) -> None:
    stranger = node.create_folder("stranger")
    ours = node.create_pod("pod-a")
    wait_until(lambda: is_attached(ours))
    assert list(stranger.iterdir()) == []


def test_a_folder_that_is_a_link_is_not_followed(node: Node, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    node.pods.tell_of("evil")
    folder = node.folder("evil")
    folder.parent.mkdir(parents=True)
    folder.symlink_to(elsewhere)
    ours = node.create_pod("pod-a")
    wait_until(lambda: is_attached(ours))
    assert list(elsewhere.iterdir()) == []


def test_names_that_the_pod_made_itself_are_replaced_and_never_followed(node: Node, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    victim.chmod(0o600)
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = node.create_folder("pod-a")
    (folder / "daemon.sock").symlink_to(victim)
    (folder / "kvoffload_engine").symlink_to(outside)
    (folder / INFORMATION).symlink_to(outside)
    node.pods.tell_of("pod-a")
    wait_until(lambda: is_attached(folder))
    assert not (folder / "kvoffload_engine").is_symlink()
    assert victim.read_text() == "untouched"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert list(outside.iterdir()) == []
    TestEngine(folder / "daemon.sock").close()


MADE: dict[str, Callable[[Path, Path], None]] = {
    "a file": lambda path, victim: path.touch(mode=0o777),
    "a link": lambda path, victim: path.symlink_to(victim),
    "a link to nowhere": lambda path, victim: path.symlink_to(victim / "nowhere"),
    "a hard link": lambda path, victim: os.link(victim / "file", path),
    "a pipe": lambda path, victim: os.mkfifo(path),
    "a socket": lambda path, victim: make_socket(path),
}


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What a pod would like the attacher to change."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "file").write_text("untouched")
    (victim / "file").chmod(0o600)
    return victim


def assert_untouched(victim: Path) -> None:
    assert [(path.name, path.read_text(), stat.S_IMODE(path.stat().st_mode)) for path in victim.iterdir()] == [
        ("file", "untouched", 0o600)
    ]
    assert stat.S_IMODE(victim.stat().st_mode) == 0o700


def test_whatever_a_pod_puts_in_its_folder_is_replaced(node: Node, victim: Path) -> None:
    for number, make in enumerate(MADE.values()):
        folder = node.create_folder(f"pod-{number}")
        for name in ("daemon.sock", "kvoffload_engine", INFORMATION):
            make(folder / name, victim)
        node.pods.tell_of(f"pod-{number}")
    for number, made in enumerate(MADE):
        folder = node.folder(f"pod-{number}")
        wait_until(lambda: is_attached(folder))  # noqa: B023 - called at once
        assert (folder / "kvoffload_engine/plugin.py").is_file()
        TestEngine(folder / "daemon.sock", engine_id=made).close()
    assert_untouched(victim)


def test_a_link_in_the_place_of_the_copy_moves_nothing_of_another_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod puts it there when the copy is whole, before the packages are moved to their places."""
    library, other, pod = (tmp_path / name for name in ("library", "other", "pod"))
    for folder in (library, other):
        (folder / "kvoffload_engine").mkdir(parents=True)
        (folder / INFORMATION).mkdir()
    pod.mkdir()
    copy_tree = attach_folder._copy_tree

    def copy_and_be_overtaken(source: Path, parent: int, name: str) -> None:
        copy_tree(source, parent, name)
        if name.startswith(".lib-"):  # and not a folder in it
            (pod / name).rename(pod / "away")
            (pod / name).symlink_to(other)

    monkeypatch.setattr(attach_folder, "_copy_tree", copy_and_be_overtaken)
    descriptor = os.open(pod, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(NotADirectoryError):
            attach_folder.write_library(descriptor, library)
    finally:
        os.close(descriptor)
    assert {path.name for path in other.iterdir()} == {"kvoffload_engine", INFORMATION}


def test_a_pod_that_changes_its_folder_all_the_time_harms_only_itself(node: Node, victim: Path) -> None:
    ended = threading.Event()
    rounds = 0

    def quarrel(folder: Path) -> None:
        nonlocal rounds
        while not ended.is_set():
            for name in ("daemon.sock", "kvoffload_engine", INFORMATION, *(one.name for one in folder.glob(".lib-*"))):
                with contextlib.suppress(OSError):
                    (folder / name).rename(folder / f"taken-{rounds}-{name}")
                with contextlib.suppress(OSError):
                    (folder / name).symlink_to(victim)
            rounds += 1

    hostile = threading.Thread(target=quarrel, args=(node.create_folder("bad"),))
    hostile.start()
    try:
        node.pods.tell_of("bad")
        for number in range(5):
            good = node.create_pod(f"good-{number}")
            wait_until(lambda: is_attached(good))  # noqa: B023 - called at once
            TestEngine(good / "daemon.sock", engine_id=f"e{number}").close()
    finally:
        ended.set()
        hostile.join()
    assert rounds > 100
    assert_untouched(victim)


def test_a_pod_that_puts_a_folder_in_the_sockets_place_harms_only_itself(node: Node) -> None:
    bad = node.create_folder("bad")
    (bad / "daemon.sock").mkdir()
    node.pods.tell_of("bad")
    good = node.create_pod("good")
    wait_until(lambda: is_attached(good))
    assert not is_attached(bad)
    (bad / "daemon.sock").rmdir()
    wait_until(lambda: is_attached(bad))


def test_a_stale_socket_of_an_earlier_attacher_is_replaced(node: Node) -> None:
    folder = node.create_folder("pod-a")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "daemon.sock"))
    node.pods.tell_of("pod-a")
    wait_until(lambda: is_attached(folder))
    TestEngine(folder / "daemon.sock").close()


def test_a_pod_whose_folder_is_gone_is_detached_and_one_recreated_is_attached_again(node: Node) -> None:
    folder = node.create_pod("pod-a")
    wait_until(lambda: is_attached(folder))
    node.pods.current = {}
    node.remove_folder("pod-a")
    wait_until(lambda: node.attacher.num_attached == 0)
    again = node.create_pod("pod-a-2")
    wait_until(lambda: is_attached(again))
    TestEngine(again / "daemon.sock").close()


def test_a_pod_recreated_under_its_name_is_attached_beside_the_old_ones_folder(node: Node) -> None:
    first = node.create_pod("uid-1", name="stateful-0")
    wait_until(lambda: is_attached(first))
    old = TestEngine(first / "daemon.sock")
    node.pods.current = {}  # evicted, or deleted: the kubelet takes its time with the folder
    second = node.create_pod("uid-2", name="stateful-0")
    wait_until(lambda: is_attached(second))
    new = TestEngine(second / "daemon.sock")
    node.remove_folder("uid-1")
    wait_until(lambda: node.attacher.num_attached == 1)
    wait_until(lambda: node.daemon.metrics()['kvoffload_engines{layout="replicated"}'] == 2)
    old.close()
    wait_until(lambda: node.daemon.metrics()['kvoffload_engines{layout="replicated"}'] == 1)
    TestEngine(second / "daemon.sock", engine_id="another").close()
    new.close()


def test_pods_that_come_and_go_at_once_leave_nothing_behind(node: Node) -> None:
    stays = node.create_pod("stays")
    before = settled_descriptors(node, stays)
    chosen = random.Random(1)
    for number in range(60):
        node.create_pod(f"pod-{number}")
        if number >= 5:
            gone = f"pod-{number - 5}"
            node.pods.current = {uid: pod for uid, pod in node.pods.current.items() if uid != gone}
            node.remove_folder(gone)
        time.sleep(chosen.uniform(0, 0.05))  # the kubelet's pace: some go before they are seen
    for number in range(55, 60):
        node.remove_folder(f"pod-{number}")
    node.pods.current = {"stays": node.pods.current["stays"]}
    wait_until(lambda: node.attacher.num_attached == 1)
    # what was under way before, and is now, holds a few; one for each pod that went would be 60
    wait_until(lambda: open_descriptors() + open_descriptors(node.daemon) < before + 10)
    TestEngine(stays / "daemon.sock").close()


def settled_descriptors(node: Node, folder: Path) -> int:
    """Of attacher and daemon, when the only pod is attached and nothing is under way any more."""
    wait_until(lambda: is_attached(folder) and node.daemon.log.count(" attached (tenant ") == 1)
    for _ in range(2):  # a look that began after that has ended
        begun = time.monotonic()
        wait_until(lambda: node.attacher.last_look > begun)  # noqa: B023 - called at once
    return open_descriptors() + open_descriptors(node.daemon)


def open_descriptors(daemon: DaemonProcess | None = None) -> int:
    """Of a daemon, or of the attacher, which runs in this process."""
    process = daemon.process.pid if daemon is not None and daemon.process is not None else "self"
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def test_every_pod_is_handed_over_again_to_a_restarted_daemon(node: Node) -> None:
    folders = [node.create_pod(f"pod-{number}") for number in range(5)]
    wait_until(lambda: all(is_attached(folder) for folder in folders))
    inodes = [(folder / "daemon.sock").stat().st_ino for folder in folders]
    node.daemon.kill()
    node.daemon.start()
    # A connection waits in the socket's queue for 5 s only, and a busy machine starts a daemon in more than that.
    wait_until(lambda: node.daemon.log.count(" attached (tenant ") == 10, timeout_seconds=60)
    for folder in folders:
        TestEngine(folder / "daemon.sock").close()
    assert [(folder / "daemon.sock").stat().st_ino for folder in folders] == inodes


def test_without_a_daemon_a_pod_gets_no_library(node: Node) -> None:
    node.daemon.kill()
    folder = node.create_pod("pod-a")
    for _ in range(2):  # a look that began when the pod was there has ended
        begun = time.monotonic()
        wait_until(lambda: node.attacher.last_look > begun)  # noqa: B023 - called at once
    assert not is_attached(folder)
    node.daemon.start()
    wait_until(lambda: is_attached(folder))


def test_a_pod_that_got_no_library_and_goes_is_detached(node: Node) -> None:
    """The daemon has its socket already; the next try needs the library alone."""
    stays = node.create_pod("stays")
    before = settled_descriptors(node, stays)
    node.library.rename(node.library.with_name("away"))
    for uid in ("goes", "waits"):
        node.create_pod(uid)
        wait_until(lambda: node.daemon.log.count("attached (tenant") > 1 and len(node.attacher._retry_at) > 0)
    wait_until(lambda: node.daemon.log.count("attached (tenant") == 3)
    node.pods.current = {uid: pod for uid, pod in node.pods.current.items() if uid != "goes"}
    node.remove_folder("goes")
    node.library.with_name("away").rename(node.library)
    wait_until(lambda: is_attached(node.folder("waits")))
    TestEngine(node.folder("waits") / "daemon.sock").close()
    assert node.daemon.log.count("attached (tenant") == 3, "a socket is handed over once"
    node.pods.current = {"stays": node.pods.current["stays"]}
    node.remove_folder("waits")
    wait_until(lambda: open_descriptors() + open_descriptors(node.daemon) == before)


def test_a_pod_that_goes_as_the_daemon_cannot_be_told_is_detached_later(node: Node) -> None:
    node.attacher.stopped.set()  # from here on it looks when it is told to
    wait_until(lambda: node.daemon.metrics()["kvoffload_attachers"] == 0)
    with node.second_attacher() as attacher:
        folder = node.create_pod("pod-a")
        attacher.look()
        assert is_attached(folder)
        node.pods.current = {}
        node.remove_folder("pod-a")
        attacher._handoff.close()
        attacher._gone_at = 0.0
        with pytest.raises(DaemonUnavailable):
            attacher._detach_gone()
        attacher._gone_at = 0.0
        attacher.look()
        assert attacher.num_attached == 0
        removed = node.kubelet.parent / "removed-pod-a" / folder.relative_to(node.kubelet / "pod-a") / "daemon.sock"
        wait_until(lambda: not is_listened_to(removed))


def is_listened_to(path: Path) -> bool:
    """Whether any process still has the listening socket."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
