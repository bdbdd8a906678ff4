"""Listening sockets: `/handoff/attach.sock`, through which the attacher hands over pods, and one for each pod.

Runs in the node daemon's event loop, made by `daemon.py`. The daemon binds no pod's socket and sees no pod's folder:
it gets each listening socket as a descriptor, and knows by it which pod speaks.
"""

import asyncio
import logging
import os
import socket
from pathlib import Path

import msgspec

from kvoffload.errors import KVOffloadError, ProtocolError, RefusalReason
from kvoffload.protocol.framing import FrameReader, receive_with_descriptors, send_frame
from kvoffload.protocol.messages import Attached, AttachPod, DetachPod, FromAttacher, Message, Refused
from kvoffload_node.failures import Part
from kvoffload_node.session.connection import Connection
from kvoffload_node.session.registry import Registry

log = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(FromAttacher).decode
_encode = msgspec.msgpack.Encoder().encode
_ATTACHER_FRAME_BYTES = 1 << 16
LISTEN_BACKLOG = 1024
RETRY_SECONDS = 1.0
ACCEPTS_PER_ROUND = 16
"""Connections of one pod that are accepted before the others have their turn."""


class Server:
    """Accepts the attacher, and the engines of every pod that it hands over."""

    def __init__(self, registry: Registry, handoff_socket: Path) -> None:
        self._registry = registry
        self._path = handoff_socket
        self._pods: dict[str, asyncio.Server] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.attachers = 0
        """Attacher connections; 0 means that no new pod is attached."""

    async def run(self) -> None:
        """Serve until cancelled."""
        self._path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listening.bind(str(self._path))
            self._path.chmod(0o600)
            listening.listen(LISTEN_BACKLOG)
            listening.setblocking(False)
            loop = asyncio.get_running_loop()
            while True:
                try:
                    peer, _ = await loop.sock_accept(listening)
                except OSError as error:  # of descriptors: the connection waits in the queue
                    why = f"{error}; {len(self._registry.connections)} connections of engines are open"
                    self._registry.region.failures.note(Part.HAND_OFF, f"the attacher cannot be heard: {why}")
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                self._registry.region.failures.clear(Part.HAND_OFF)
                task = loop.create_task(self._serve_attacher(peer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        finally:
            listening.close()
            self._path.unlink(missing_ok=True)

    def close_pods(self) -> None:
        """Stop listening for engines."""
        for server in self._pods.values():
            server.close()
        self._pods.clear()

    async def _serve_attacher(self, peer: socket.socket) -> None:
        self.attachers += 1
        peer.setblocking(False)
        reader = FrameReader()
        descriptors: list[int] = []
        try:
            while True:
                await _readable(peer)
                data, received = receive_with_descriptors(peer, _ATTACHER_FRAME_BYTES)
                descriptors += received
                if not data:
                    return
                reader.feed(data)
                while (payload := reader.next_frame()) is not None:
                    answer = await self._handle(_decode(payload), descriptors)
                    if answer is not None:
                        send_frame(peer, _encode(answer))
        except (KVOffloadError, msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
            log.warning("the attacher's connection ended: %s", error)
        finally:
            self.attachers -= 1
            for descriptor in descriptors:
                os.close(descriptor)
            peer.close()

    async def _handle(self, message: FromAttacher, descriptors: list[int]) -> Message | None:
        if isinstance(message, DetachPod):
            self._detach(message.pod_uid)
            self._registry.remove_pod(message.pod_uid)
            return None
        if not descriptors:
            raise ProtocolError("AttachPod without a descriptor")
        # an OSError leaves the descriptor to be closed with the others
        listening = socket.socket(fileno=descriptors[0])
        del descriptors[0]
        try:
            await self._attach(message, listening)
        except (KVOffloadError, OSError) as error:
            listening.close()
            if message.pod_uid not in self._pods:
                self._registry.remove_pod(message.pod_uid)  # it may never be tried again
            log.warning("pod %s/%s could not be attached: %s", message.namespace, message.name, error)
            return Refused(RefusalReason.NOT_READY.value, str(error))
        return Attached(message.pod_uid)

    async def _attach(self, message: AttachPod, listening: socket.socket) -> None:
        if listening.family != socket.AF_UNIX or listening.type != socket.SOCK_STREAM:
            raise ProtocolError("the descriptor with AttachPod is no Unix stream socket")
        pod = self._registry.add_pod(message.pod_uid, message.namespace, message.name, message.predicted_layout)
        listening.setblocking(False)
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(self._registry, pod), sock=listening, backlog=ACCEPTS_PER_ROUND
        )
        # asyncio's backlog is both, how many may wait and how many are accepted at once
        listening.listen(LISTEN_BACKLOG)
        self._detach(message.pod_uid)
        self._pods[message.pod_uid] = server
        log.info("pod %s/%s attached (tenant %s)", pod.namespace, pod.name, pod.tenant.name)

    def _detach(self, pod_uid: str) -> None:
        server = self._pods.pop(pod_uid, None)
        if server is not None:
            server.close()


async def _readable(peer: socket.socket) -> None:
    """Wait until the socket has something to read."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(peer, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(peer)
