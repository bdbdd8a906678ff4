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
