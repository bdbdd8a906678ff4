"""Offsets as they stand in messages: packed little-endian int64.

Runs in vLLM's engine core and workers, called by `kvoffload_engine.manager`, `link`, `credits`, `worker` and
`worker_link` for whole look-ups and stores at once: numpy, which the node daemon's own
(`kvoffload_node.session.packing`) need not load.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvoffload.errors import ProtocolError
from kvoffload.protocol.messages import OFFSET_BYTES


def pack(offsets: Iterable[int]) -> bytes:
    """Offsets as they stand in messages."""
    return np.fromiter(offsets, dtype="<i8").tobytes()


def unpack(packed: bytes) -> npt.NDArray[np.int64]:
    """Offsets of a message. Raises ProtocolError."""
    if len(packed) % OFFSET_BYTES:
        raise ProtocolError(f"the daemon sent {len(packed)} bytes of offsets, no multiple of {OFFSET_BYTES}")
    return np.frombuffer(packed, dtype="<i8")
