"""A client process of the eight-engine row: look-ups of 256 keys in a loop, latencies as JSON on standard output."""

import json
import socket
import sys
import time
from pathlib import Path

import msgspec

from kvoffload.protocol.framing import FrameReader, pack_frame
from kvoffload.protocol.messages import Found, Lookup, Unpin

BATCH = 256


def main(path: str, mode: str, seconds: float) -> None:
    """`mode` is `daemon` (attach as an engine) or `echo` (a bare server)."""
    if mode == "daemon":
        from daemon_process import TestEngine

        engine = TestEngine(Path(path), engine_id=sys.argv[4], ranks=1, part_bytes=4096)
        sock = engine.scheduler._sock
        sock.setblocking(True)
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
    keys = b"".join(number.to_bytes(32, "little") for number in range(BATCH))
    encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Found).decode
    reader = FrameReader()
    print("ready", flush=True)
    sys.stdin.readline()
    latencies = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        sock.sendall(pack_frame(encode(Lookup(1, keys))))
        while (payload := reader.next_frame()) is None:
            reader.feed(sock.recv(1 << 16))
        found = decode(payload)
        latencies.append(time.perf_counter() - begun)
        if mode == "daemon":
            hits = b"".join(
                found.offsets[i : i + 8] for i in range(0, len(found.offsets), 8) if found.offsets[i + 7] != 0xFF
            )
            if hits:
                sock.sendall(pack_frame(encode(Unpin(hits))))
        time.sleep(0.002)
    json.dump(latencies, sys.stdout)


main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
