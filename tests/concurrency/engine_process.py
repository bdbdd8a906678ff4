"""An engine in a process of its own, to be stopped and killed: `engine_process.py <socket> <id> <what> [number]`.

Prints one line for each step it has reached, and waits for a line on standard input where a test wants to choose the
moment.
"""

import sys
from pathlib import Path

import numpy as np

from byte_engine import ByteEngine, key_of


def say(line: str) -> None:
    print(line, flush=True)


def pin_all(engine: ByteEngine) -> None:
    """Fill the pool and lease every slot of it; then hold them until killed."""
    number = 0
    while True:
        offsets = engine.reserve_and_return(16)
        if not offsets and engine.reason == "AllLeased":  # fewer than 16 may come before the last of them is leased
            break
        keys = [key_of(number + i, salt=9) for i in range(16)]
        stored = engine.store(keys[: max(1, len(offsets))])
        number += len(stored)
        if stored:
            while -1 in engine.lookup(keys[: len(stored)]):
                pass
    say(f"pinned {len(engine.held.pins)}")
    sys.stdin.readline()


def store_one_key(engine: ByteEngine, fill: int) -> None:
    """Store the same key again and again, each time with this engine's own fill byte, in two halves."""
    say("storing")
    while True:
        offsets = engine.begin_store([key_of(0, salt=10)])
        for rank in range(engine.ranks):
            for offset in offsets:
                begin = offset + rank * engine.part_bytes
                engine.regions[rank][begin : begin + engine.part_bytes] = np.uint8(fill)
            engine.end_write(rank, offsets)


def store_in_steps(engine: ByteEngine, first: int) -> None:
    """One store, a line before each of its steps; the test kills it at one of them."""

    def step(name: str) -> None:
        say(name)
        sys.stdin.readline()

    keys = [key_of(first + number, salt=11) for number in range(4)]
    step("reserve")
    offsets = engine.begin_store(keys)
    step("assigned")
    engine.write(0, offsets)
    step("written-0")
    engine.end_write(0, offsets)
    step("sealed-0")
    engine.write(1, offsets)
    step("written-1")
    engine.end_write(1, offsets)
    step("sealed-1")
    sys.stdin.readline()


def main() -> None:
    path, engine_id, what = sys.argv[1:4]
    engine = ByteEngine(Path(path), engine_id)
    engine.connect()
    engine.wait_for_room(1)
    say("ready")
    if what == "pin-all":
        pin_all(engine)
    elif what == "store-one-key":
        store_one_key(engine, int(sys.argv[4]))
    elif what == "store-in-steps":
        store_in_steps(engine, int(sys.argv[4]))
    else:
        sys.stdin.readline()


if __name__ == "__main__":
    main()
