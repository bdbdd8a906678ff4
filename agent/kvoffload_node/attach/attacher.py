"""The attacher: gives each opted-in pod of this node its socket and library, and the daemon the socket.

Runs as `python -m kvoffload_node attacher`, in the daemon's pod but in a container that has the kubelet's pods folder
and nothing else. It reads nothing that a pod sends.

    known pod, folder there  ── bind ──> listening ── AttachPod ──> daemon ── library ──> attached
                                            │ remembered from here on: the daemon may have it
    pod or folder gone       ── DetachPod ──┴─> forgotten
    daemon connected anew    ── AttachPod for every pod that is remembered

One look costs a stat of the kubelet's folder and one open for each pod that waits, so it is taken every 50 ms:
nothing can go silent, and a pod has its socket within 100 ms of its folder.
"""

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Protocol

from kvoffload.errors import DaemonUnavailable, KVOffloadError, SessionRefused
from kvoffload.protocol.messages import AttachPod
from kvoffload_node.attach.folder import bind_socket, open_pod_folder, write_library
from kvoffload_node.attach.handoff import Handoff
from kvoffload_node.attach.pods import ObservedPod

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
RETRY_SECONDS = 2.0
"""How long a pod that failed to attach waits for its next try."""
GONE_SECONDS = 1.0
"""How often the folders of attached pods are looked for."""


class PodSource(Protocol):
    """What `pods.NodePods` offers."""

    current: dict[str, ObservedPod]

    def refresh(self) -> bool:
        """List the pods again now; False if that was done too short a time ago."""


@dataclass(slots=True)
class _Attachment:
    request: AttachPod
    listening: socket
    has_library: bool = False
    """The last step: engines connect from now on."""


class Attacher:
    """Attaches pods until stopped."""

    def __init__(self, *, pods: PodSource, kubelet_pods: Path, library: Path, handoff: Handoff) -> None:
        self._pods = pods
        self._kubelet_pods = kubelet_pods
        self._library = library
        self._handoff = handoff
        self._attached: dict[str, _Attachment] = {}
        self._retry_at: dict[str, float] = {}
        self._folder_changed_ns = 0
        self._gone_at = 0.0
        self._said = ""
        self.last_look = time.monotonic()
        self.stopped = threading.Event()

    @property
    def num_attached(self) -> int:
        """Pods that have a socket which the daemon serves, and the library."""
        return sum(attachment.has_library for attachment in self._attached.values())

    def run(self) -> None:
        """Look every `LOOK_SECONDS` until `stopped` is set."""
        while not self.stopped.wait(LOOK_SECONDS):
            self.look()
        self._handoff.close()
        for attachment in self._attached.values():
            attachment.listening.close()

    def look(self) -> None:
        """One pass: connect, attach what can be, detach what is gone."""
        self.last_look = time.monotonic()
        try:
            if self._handoff.ensure_connected():
                self._hand_over_all()
            self._refresh_on_unknown_folder()
            current = self._pods.current
            for uid, pod in current.items():
                attachment = self._attached.get(uid)
                is_due = attachment is None or not attachment.has_library
                if is_due and self._retry_at.get(uid, 0.0) <= self.last_look:
                    self._attach(pod)
            self._detach_gone()
        except DaemonUnavailable as error:
            self._say(str(error))
        except (KVOffloadError, OSError) as error:
            self._say(f"pods are not looked at: {error}")

    def _attach(self, pod: ObservedPod) -> None:
        try:
            with open_pod_folder(self._kubelet_pods, pod.uid) as folder:
                if folder is None:
                    return
                attachment = self._attached.get(pod.uid) or self._hand_over(pod, bind_socket(folder))
                write_library(folder, self._library)
        except (OSError, KVOffloadError) as error:
            self._retry_at[pod.uid] = time.monotonic() + RETRY_SECONDS
            if isinstance(error, DaemonUnavailable):
                raise
            log.warning("pod %s/%s is not attached: %s", pod.namespace, pod.name, error)
            return
        attachment.has_library = True
        log.info("pod %s/%s is attached", pod.namespace, pod.name)

    def _hand_over(self, pod: ObservedPod, listening: socket) -> _Attachment:
        """Raises SessionRefused: the daemon does not have it; DaemonUnavailable: it may, and gets it again."""
        request = AttachPod(pod.uid, pod.namespace, pod.name, pod.predicted_layout)
        attachment = self._attached[pod.uid] = _Attachment(request, listening)
        try:
            self._handoff.attach(request, listening)
        except SessionRefused:
            self._forget(pod.uid)
            raise
        return attachment

    def _hand_over_all(self) -> None:
        self._say(f"connected to the daemon; {len(self._attached)} pods to hand over")
        for uid, attachment in list(self._attached.items()):
            try:
                self._handoff.attach(attachment.request, attachment.listening)
            except SessionRefused as error:
                log.warning("pod %s/%s: %s", attachment.request.namespace, attachment.request.name, error)
                self._forget(uid)

    def _detach_gone(self) -> None:
        """The kubelet removes a pod's folder when the pod is gone; what the API server says is older than that."""
        if self.last_look < self._gone_at:
            return
        self._gone_at = self.last_look + GONE_SECONDS
        for uid in [uid for uid in self._attached if not (self._kubelet_pods / uid).exists()]:
            self._handoff.detach(uid)
            self._forget(uid)
            log.info("pod %s is detached", uid)
        for uid in [uid for uid in self._retry_at if uid not in self._pods.current]:
            del self._retry_at[uid]

    def _forget(self, uid: str) -> None:
        self._attached.pop(uid).listening.close()

    def _refresh_on_unknown_folder(self) -> None:
        """A folder that appeared means a pod; if the watch has not told of any, ask."""
        changed_ns = self._kubelet_pods.stat().st_mtime_ns
        if changed_ns != self._folder_changed_ns:
            unknown = any(entry.name not in self._pods.current for entry in self._kubelet_pods.iterdir())
            if not unknown or self._pods.refresh():
                self._folder_changed_ns = changed_ns

    def _say(self, line: str) -> None:
        if line != self._said:
            self._said = line
            log.info("%s", line)
