"""The attacher's connection to the daemon: pods and their listening sockets go one way, short answers come back.

Runs in the attacher, used by `attacher.py`. A broken connection is a fact to act on, not an error: the attacher
connects again and hands every pod over again.
"""

import select
import socket
from pathlib import Path

import msgspec

from kvoffload.errors import DaemonUnavailable, ProtocolError, SessionRefused
from kvoffload.protocol.client import decode_from_daemon, refusal_reason
from kvoffload.protocol.framing import FrameReader, send_frame
from kvoffload.protocol.messages import Attached, AttachPod, DetachPod, Message, Refused

ANSWER_SECONDS = 5.0
_encode = msgspec.msgpack.Encoder().encode


class Handoff:
    """One connection at a time to the daemon beside us."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sock: socket.socket | None = None
        self._reader = FrameReader()

    def ensure_connected(self) -> bool:
        """Connect if needed; True if this is a new connection, over which every pod must be handed again.

        Raises DaemonUnavailable.
        """
        if self._sock is not None and not _is_closed_by_peer(self._sock):
            return False
        self.close()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.settimeout(ANSWER_SECONDS)
        try:
            sock.connect(str(self._path))
        except OSError as error:
            sock.close()
            raise DaemonUnavailable(f"no daemon at {self._path}: {error}") from error
        self._sock, self._reader = sock, FrameReader()
        return True

    def attach(self, request: AttachPod, listening: socket.socket) -> None:
        """Hand a pod over. Raises DaemonUnavailable, SessionRefused."""
        self._send(request, [listening.fileno()])
        answer = self._receive()
        if isinstance(answer, Refused):
            raise SessionRefused(refusal_reason(answer.reason), answer.message)
        if not isinstance(answer, Attached) or answer.pod_uid != request.pod_uid:
            self.close()
            raise DaemonUnavailable(f"the daemon answered an attach with {type(answer).__name__}")

    def detach(self, pod_uid: str) -> None:
        """The pod's folder is gone. Raises DaemonUnavailable."""
        self._send(DetachPod(pod_uid), [])

    def close(self) -> None:
        """End the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _send(self, message: Message, descriptors: list[int]) -> None:
        if self._sock is None:
            raise DaemonUnavailable(f"not connected to {self._path}")
        try:
            send_frame(self._sock, _encode(message), descriptors)
        except OSError as error:
            self.close()
            raise DaemonUnavailable(f"the daemon at {self._path} is gone: {error}") from error

    def _receive(self) -> Message:
        if self._sock is None:
            raise DaemonUnavailable(f"not connected to {self._path}")
        try:
            while (payload := self._reader.next_frame()) is None:
                data = self._sock.recv(1 << 16)
                if not data:
                    raise ConnectionError("closed")
                self._reader.feed(data)
            answer = decode_from_daemon(payload)
        except OSError as error:
            self.close()
            raise DaemonUnavailable(f"the daemon at {self._path} is gone: {error}") from error
        except ProtocolError as error:
            self.close()
            raise DaemonUnavailable(f"the daemon at {self._path} cannot be understood: {error}") from error
        return answer


def _is_closed_by_peer(sock: socket.socket) -> bool:
    """Between answers there is nothing to read, unless the peer has closed."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
