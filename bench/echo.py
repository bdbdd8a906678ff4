"""A bare msgspec echo server on a Unix socket: what any answer from another process costs at least here."""

import asyncio
import sys

import msgspec

from kvoffload.protocol.framing import FrameReader, pack_frame
from kvoffload.protocol.messages import Found, FromEngine, Lookup

_decode = msgspec.msgpack.Decoder(FromEngine).decode
_encode = msgspec.msgpack.Encoder().encode


class Echo(asyncio.Protocol):
    """Answers each look-up with misses, without looking."""

    def __init__(self) -> None:
        self._reader = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (payload := self._reader.next_frame()) is not None:
            message = _decode(payload)
            assert isinstance(message, Lookup)
            answer = Found(message.request, b"\xff" * (8 * (len(message.keys) // 32)))
            self._transport.write(pack_frame(_encode(answer)))


async def main(path: str) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_unix_server(Echo, path)
    print("ready", flush=True)
    await server.serve_forever()


asyncio.run(main(sys.argv[1]))
