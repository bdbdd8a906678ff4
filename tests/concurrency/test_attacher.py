"""The attacher on a kubelet's pods folder, beside a real daemon, with pods that behave and pods that do not."""

import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from daemon_process import DaemonProcess, TestEngine, wait_until
from kvoffload_node.attach.attacher import Attacher
from kvoffload_node.attach.handoff import Handoff
from kvoffload_node.attach.pods import ObservedPod


@dataclass
class ListedPods:
    """Pods as the API server would list them; `hidden` ones are those that a silent watch has not told of."""

    current: dict[str, ObservedPod] = field(default_factory=dict)
    hidden: dict[str, ObservedPod] = field(default_factory=dict)
    refreshed: int = 0

    def tell_of(self, uid: str, *, hidden: bool = False) -> None:
        pod = ObservedPod(uid, "default", f"name-{uid}", "auto")
        if hidden:
            self.hidden = {**self.hidden, uid: pod}
        else:
            self.current = {**self.current, uid: pod}

    def refresh(self) -> bool:
        self.refreshed += 1
        self.current = {**self.current, **self.hidden}
        return True


@dataclass
class Node:
    """A node with a running attacher and daemon."""

    kubelet: Path
    pods: ListedPods
    attacher: Attacher
    daemon: DaemonProcess
    library: Path

    def folder(self, uid: str) -> Path:
        return self.kubelet / uid / "volumes/kubernetes.io~empty-dir/kvoffload"

    def create_folder(self, uid: str) -> Path:
        folder = self.folder(uid)
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        return folder

    def create_pod(self, uid: str, *, hidden: bool = False) -> Path:
        self.pods.tell_of(uid, hidden=hidden)
        return self.create_folder(uid)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose sockets have paths short enough to connect to (108 bytes)."""
    folder = Path(tempfile.mkdtemp(prefix="kvo-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def node(short_path: Path) -> Iterator[Node]:
    tmp_path = short_path
    library = tmp_path / "library"
    (library / "kvoffload_engine").mkdir(parents=True)
    (library / "kvoffload_engine/plugin.py").write_text("def register(): pass\n")
    (library / "kvoffload_engine-0.1.0.dist-info").mkdir()
    (library / "kvoffload_engine-0.1.0.dist-info/METADATA").write_text("Name: kvoffload_engine\n")
    kubelet = tmp_path / "kubelet"
    kubelet.mkdir()
    with DaemonProcess(tmp_path / "d", capacity_bytes=32 << 20) as daemon:
        wait_until(lambda: (daemon.handoff / "attach.sock").exists())
        pods = ListedPods()
        attacher = Attacher(
            pods=pods,
            kubelet_pods=kubelet,
            library=library,
            handoff=Handoff(daemon.handoff / "attach.sock"),
        )
        thread = threading.Thread(target=attacher.run)
        thread.start()
        yield Node(kubelet, pods, attacher, daemon, library)
        attacher.stopped.set()
        thread.join(10)


def is_attached(folder: Path) -> bool:
    return (folder / "lib").is_dir()


def test_a_pod_gets_a_world_writable_socket_then_a_whole_library(node: Node) -> None:
    folder = node.create_pod("pod-a")
    wait_until(lambda: is_attached(folder))
    mode = (folder / "daemon.sock").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o666
    copied = {str(path.relative_to(folder / "lib")) for path in (folder / "lib").rglob("*") if path.is_file()}
    assert copied == {"kvoffload_engine/plugin.py", "kvoffload_engine-0.1.0.dist-info/METADATA"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in (folder / "lib").rglob("*") if path.is_file())
    TestEngine(folder / "daemon.sock").close()


@pytest.mark.alone
def test_the_socket_listens_within_100_ms_of_the_folder(node: Node) -> None:
    times = []
    for number in range(10):
        begun = time.monotonic()
        folder = node.create_pod(f"pod-{number}")
        wait_until(lambda: (folder / "daemon.sock").exists(), pause_seconds=0.002)  # noqa: B023 - called at once
        times.append(time.monotonic() - begun)
    assert sorted(times)[len(times) // 2] < 0.1, times


def test_110_pods_at_once_are_all_attached(node: Node) -> None:
    folders = [node.create_pod(f"pod-{number}") for number in range(110)]
    wait_until(lambda: all(is_attached(folder) for folder in folders))
    assert node.attacher.num_attached == 110


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
    (folder / "lib").symlink_to(outside)
    node.pods.tell_of("pod-a")
    wait_until(lambda: is_attached(folder) and not (folder / "lib").is_symlink())
    assert victim.read_text() == "untouched"
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert list(outside.iterdir()) == []
    TestEngine(folder / "daemon.sock").close()


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
    node.kubelet.joinpath("pod-a").rename(node.kubelet.parent / "removed")
    wait_until(lambda: node.attacher.num_attached == 0)
    again = node.create_pod("pod-a-2")
    wait_until(lambda: is_attached(again))
    TestEngine(again / "daemon.sock").close()


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
    wait_until(lambda: (folder / "daemon.sock").exists() or node.attacher.num_attached == 0)
    assert not is_attached(folder)
    node.daemon.start()
    wait_until(lambda: is_attached(folder))
