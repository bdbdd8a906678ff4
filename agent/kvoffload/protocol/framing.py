"""Frames: a 4-byte little-endian length, then that many bytes of msgpack; descriptors come with a frame's first byte.

Runs in every process that speaks the protocol.
"""

import array
import os
import socket
import struct
from collections.abc import Sequence

from kvoffload.errors import FrameTooLarge, ProtocolError
from kvoffload.protocol.messages import MAX_FRAME_BYTES

_LENGTH = struct.Struct("<I")
MAX_DESCRIPTORS = 4
"""Descriptors that one receive can take; more are closed by the kernel (MSG_CTRUNC) and end the session."""


def pack_frame(payload: bytes) -> bytes:
    """Put the length before one encoded message."""
    if not 0 < len(payload) <= MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a frame of {len(payload)} bytes; allowed are 1 to {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into frames. `feed` bytes as they come, then take whole frames with `next_frame`."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        """The longest frame that is taken from here on."""
        self._buffer = bytearray()
        self._start = 0

    @property
    def num_bytes(self) -> int:
        """Bytes in memory: of unfinished frames, and of frames that were not taken yet."""
        return len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Append what was received."""
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        self._buffer += data

    def next_frame(self) -> bytes | None:
        """Take the next whole frame's payload, or None if more bytes are needed. Raises FrameTooLarge."""
        if len(self._buffer) - self._start < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if not 0 < length <= self.max_frame_bytes:
            raise FrameTooLarge(f"a frame of {length} bytes was announced; allowed are 1 to {self.max_frame_bytes}")
        begin = self._start + _LENGTH.size
        if len(self._buffer) < begin + length:
            return None
        self._start = begin + length
        payload = bytes(memoryview(self._buffer)[begin : self._start])
        if self._start == len(self._buffer):
            self._buffer.clear()
            self._start = 0
        return payload


def send_frame(sock: socket.socket, payload: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send one frame whole on a blocking socket; descriptors travel with its first bytes."""
    data = memoryview(pack_frame(payload))
    sent = 0
    if descriptors:
        sent = socket.send_fds(sock, [data], list(descriptors))
    sock.sendall(data[sent:])


def receive_with_descriptors(sock: socket.socket, num_bytes: int) -> tuple[bytes, list[int]]:
    """One recvmsg: up to `num_bytes` bytes and the descriptors that came with them (close-on-exec).

    Raises ProtocolError if more descriptors came than `MAX_DESCRIPTORS`; those that came are closed.
    """
    descriptors = array.array("i")
    data, control, flags, _ = sock.recvmsg(
        num_bytes, socket.CMSG_SPACE(MAX_DESCRIPTORS * descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:whole])
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(f"more than {MAX_DESCRIPTORS} descriptors came with one message")
    return data, list(descriptors)
