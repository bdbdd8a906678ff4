"""A pod that sends look-ups of many keys, and small messages between them, over all of its connections, as fast as the
daemon takes them, until killed.

    python flood.py SOCKET NUM_RANKS

Says `flooding` on its standard output when the first answers are there.
"""

import selectors
import sys
from pathlib import Path

import msgspec

from daemon_process import TestEngine
from kvoffload.protocol.framing import pack_frame
from kvoffload.protocol.messages import MAX_KEYS, Lookup, Unpin

RECEIVE_BYTES = 1 << 20
SMALL_MESSAGES = 10_000
"""To each large one: a few bytes each, so that sending costs much less than handling."""


def main(path: Path, num_ranks: int) -> None:
    engine = TestEngine(path, engine_id="flood", ranks=num_ranks, part_bytes=4096)
    encode = msgspec.msgpack.encode
    flood = pack_frame(encode(Lookup(1, bytes(32 * MAX_KEYS)))) + pack_frame(encode(Unpin(b""))) * SMALL_MESSAGES
    selector = selectors.DefaultSelector()
    sent = {}
    for session in (engine.scheduler, *engine.workers):
        session._sock.setblocking(False)
        selector.register(session._sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        sent[session._sock] = 0
    answered = 0
    while True:
        for key, events in selector.select():
            sock = key.fileobj
            if events & selectors.EVENT_READ:
                answered += len(sock.recv(RECEIVE_BYTES))
                if answered > 8 * MAX_KEYS:
                    print("flooding", flush=True)
                    answered = -(1 << 62)
            if events & selectors.EVENT_WRITE:
                sent[sock] = (sent[sock] + sock.send(memoryview(flood)[sent[sock] :])) % len(flood)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
