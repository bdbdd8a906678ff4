"""Pages that another tenant needs are punched when every worker that maps them has answered or is dead (case 14)."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from byte_engine import ByteEngine, content_of, unpack
from daemon_process import wait_until
from kvoffload.protocol.messages import Revoke, Revoked
from small_pool import NUM_SLOTS, attach, fill, start


def wait_for_revoke(engine: ByteEngine, rank: int) -> list[int]:
    """The extents that the daemon asks of this rank."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for message in engine.workers[rank].receive(0.05):
            if isinstance(message, Revoke):
                return unpack(message.extents)
    raise AssertionError("nothing was asked back")


def first_part(engine: ByteEngine, offset: int) -> np.ndarray:
    """The silent rank's part of a slot, as its own mapping shows it now."""
    begin = offset + engine.part_bytes
    return np.array(engine.regions[1][begin : begin + engine.part_bytes])


@pytest.mark.parametrize("end", ["it answers", "it dies"])
def test_pages_stay_while_one_of_two_workers_is_silent(folder: Path, end: str) -> None:
    with start(folder, None, sharing="Namespace") as daemon:
        first = attach(daemon.attach("a", namespace="one"), "a")
        keys = fill(first, NUM_SLOTS, salt=1)
        places = dict(zip(first.lookup(keys), keys, strict=True))
        first.unpin(list(places))
        second = attach(daemon.attach("b", namespace="two"), "b")
        assert second.reserve_and_return(4) == []
        extents = wait_for_revoke(first, 0)
        first.workers[0].send(Revoked(np.array(extents, dtype="<i8").tobytes()))
        assert wait_for_revoke(first, 1) == extents
        extent_bytes = first.workers[1].welcome.extent_bytes
        (offset, key) = next(
            (offset, key) for offset, key in places.items() if offset // extent_bytes * extent_bytes == extents[0]
        )
        for _ in range(30):  # each is a message that the daemon has answered
            assert second.reserve_and_return(4) == []
            assert np.array_equal(first_part(first, offset), content_of(key, 1, first.part_bytes))
        if end == "it answers":
            first.workers[1].send(Revoked(np.array(extents, dtype="<i8").tobytes()))
        else:
            first.workers[1].close()
            os.close(first.locks.pop(1))
        wait_until(lambda: len(second.reserve_and_return(4)) == 4)
        assert not first_part(first, offset).any()
        second.close()
        first.close()
