"""Extents are asked back in messages within their bounds, and are given back when each worker has answered for all."""

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from kvoffload.protocol.messages import FromDaemon, Revoke
from kvoffload_node.session.engines import Session
from kvoffload_node.session.packing import unpack_offsets
from kvoffload_node.session.revocation import Revocations

EXTENT_BYTES = 1 << 26


@pytest.mark.parametrize("num_extents", [1, 8192, 8193, 20_000])
async def test_a_region_of_many_extents_is_asked_back_whole(num_extents: int) -> None:
    revocations, sent = Revocations(EXTENT_BYTES), []
    session = Session(1, None, 0, b"", connection=SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    revoking = asyncio.ensure_future(revocations.revoke([session], range(num_extents)))
    await asyncio.sleep(0)
    decode = msgspec.msgpack.Decoder(FromDaemon).decode
    messages = [decode(msgspec.msgpack.encode(message)) for message in sent]
    assert {type(message) for message in messages} == {Revoke}
    extents = [unpack_offsets(message.extents) for message in messages]
    assert [extent for piece in extents for extent in piece] == [
        position * EXTENT_BYTES for position in range(num_extents)
    ]
    for piece in extents:
        await asyncio.sleep(0)
        assert not revoking.done()
        revocations.unmapped(session, piece)
    await asyncio.wait_for(revoking, 1)


class Worker:
    """A worker's session, and what it was asked for over its present connection."""

    def __init__(self, number: int, *, connected: bool = True) -> None:
        self.asked: list[int] = []
        connection = SimpleNamespace(send=lambda message: self.asked.extend(unpack_offsets(message.extents)))
        self.session = Session(number, None, 0, b"", connection=connection if connected else None)  # type: ignore[arg-type]


async def begin(revocations: Revocations, *workers: Worker) -> "asyncio.Future[None]":
    revoking = asyncio.ensure_future(revocations.revoke([worker.session for worker in workers], [0, 1]))
    await asyncio.sleep(0)
    assert not revoking.done()
    return revoking


async def test_a_worker_without_a_connection_is_asked_when_it_has_one_and_answers_for_all_that_it_maps() -> None:
    revocations, silent, again = Revocations(EXTENT_BYTES), Worker(1, connected=False), Worker(2)
    revoking = await begin(revocations, silent)
    revocations.succeeded(silent.session, again.session)
    revocations.remind(again.session)
    assert again.asked == [0, EXTENT_BYTES]
    revocations.died(silent.session)  # only its attachment of before
    revocations.unmapped(again.session, [0])
    await asyncio.sleep(0)
    assert not revoking.done()
    revocations.unmapped(again.session, [EXTENT_BYTES])
    await asyncio.wait_for(revoking, 1)


async def test_pages_are_taken_when_each_worker_has_answered_or_is_dead() -> None:
    revocations, first, second = Revocations(EXTENT_BYTES), Worker(1), Worker(2)
    revoking = await begin(revocations, first, second)
    revocations.unmapped(first.session, [0, EXTENT_BYTES, 7 * EXTENT_BYTES])
    await asyncio.sleep(0)
    assert not revoking.done()
    revocations.died(second.session)
    await asyncio.wait_for(revoking, 1)
    revocations.unmapped(second.session, [0])  # what was on its way when it died
    await asyncio.wait_for(revocations.revoke([], [0]), 1)  # nobody maps it


async def test_an_extent_is_asked_for_by_each_that_takes_it_back() -> None:
    """Of two that wait for one worker each has its own answer."""
    revocations, worker = Revocations(EXTENT_BYTES), Worker(1)
    first = asyncio.ensure_future(revocations.revoke([worker.session], [0]))
    second = asyncio.ensure_future(revocations.revoke([worker.session], [1]))
    await asyncio.sleep(0)
    revocations.unmapped(worker.session, [EXTENT_BYTES])
    await asyncio.wait_for(second, 1)
    assert not first.done()
    revocations.unmapped(worker.session, [0])
    await asyncio.wait_for(first, 1)
