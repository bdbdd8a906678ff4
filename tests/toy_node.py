"""A kubelet's pods folder with a real attacher and a real daemon, for the attacher's tests and the bench."""

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from daemon_process import DaemonProcess, wait_until
from kvoffload_node.attach.attacher import Attacher
from kvoffload_node.attach.handoff import Handoff
from kvoffload_node.attach.pods import ObservedPod


@dataclass
class ListedPods:
    """Pods as the API server would list them; `hidden` ones are those that a silent watch has not told of."""

    current: dict[str, ObservedPod] = field(default_factory=dict)
    hidden: dict[str, ObservedPod] = field(default_factory=dict)
    refreshed: int = 0

    def tell_of(self, uid: str, *, hidden: bool = False, name: str = "") -> None:
        pod = ObservedPod(uid, "default", name or f"name-{uid}", "auto")
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

    def create_pod(self, uid: str, *, hidden: bool = False, name: str = "") -> Path:
        self.pods.tell_of(uid, hidden=hidden, name=name)
        return self.create_folder(uid)

    @contextlib.contextmanager
    def second_attacher(self) -> Iterator[Attacher]:
        """One that looks only when it is told to, beside the one that runs."""
        handoff = Handoff(self.daemon.handoff / "attach.sock")
        attacher = Attacher(pods=self.pods, kubelet_pods=self.kubelet, library=self.library, handoff=handoff)
        attacher.look()
        try:
            yield attacher
        finally:
            attacher.stopped.set()
            attacher.run()

    def remove_folder(self, uid: str) -> None:
        """At once, as seen from the attacher."""
        self.kubelet.joinpath(uid).rename(self.kubelet.parent / f"removed-{uid}")


@contextlib.contextmanager
def running_node() -> Iterator[Node]:
    """In a folder whose sockets have paths short enough to connect to (108 bytes)."""
    with tempfile.TemporaryDirectory(prefix="kvo-") as name:
        tmp_path = Path(name)
        library = tmp_path / "library"
        (library / "kvoffload_engine").mkdir(parents=True)
        (library / "kvoffload_engine/plugin.py").write_text("def register(): pass\n")
        (library / "kvoffload_engine-0.1.0.dist-info").mkdir()
        (library / "kvoffload_engine-0.1.0.dist-info/METADATA").write_text("Name: kvoffload_engine\n")
        (library / "kvoffload_engine-0.1.0.dist-info/entry_points.txt").write_text(
            "[vllm.general_plugins]\nkvoffload = kvoffload_engine.plugin:register\n"
        )
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
            try:
                yield Node(kubelet, pods, attacher, daemon, library)
            finally:
                attacher.stopped.set()
                thread.join(10)
