"""Packed arrays of the protocol: offsets are little-endian int64, keys are bytes of one length.

Runs in the node daemon, for every message; `struct` with a cached format unpacks 256 keys in about 6 us.
"""

import array
import struct
import sys
from collections.abc import Iterable
from functools import lru_cache

from kvoffload.errors import ProtocolError
from kvoffload.protocol.messages import OFFSET_BYTES

_IS_LITTLE_ENDIAN = sys.byteorder == "little"


def pack_offsets(offsets: Iterable[int]) -> bytes:
    """Offsets as they stand in a message."""
    packed = array.array("q", offsets)
    if not _IS_LITTLE_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack_offsets(packed: bytes) -> list[int]:
    """The offsets of a message. Raises ProtocolError."""
    if len(packed) % OFFSET_BYTES:
        raise ProtocolError(f"{len(packed)} bytes of offsets are no multiple of {OFFSET_BYTES}")
    offsets = array.array("q", packed)
    if not _IS_LITTLE_ENDIAN:
        offsets.byteswap()
    return offsets.tolist()


def unpack_keys(packed: bytes, key_bytes: int) -> tuple[bytes, ...]:
    """The keys of a message, each `key_bytes` long. Raises ProtocolError."""
    count, rest = divmod(len(packed), key_bytes)
    if rest:
        raise ProtocolError(f"{len(packed)} bytes of keys are no multiple of {key_bytes}")
    return _keys_format(key_bytes, count).unpack(packed)


@lru_cache(maxsize=1024)
def _keys_format(key_bytes: int, count: int) -> struct.Struct:
    return struct.Struct(f"{key_bytes}s" * count)
