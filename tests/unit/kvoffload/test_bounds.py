"""What an engine may say without bound is said in messages within theirs; the longest of each kind fits in a frame."""

import msgspec
import pytest

from kvoffload.layout.rows import MAX_RANKS
from kvoffload.protocol.framing import pack_frame
from kvoffload.protocol.messages import (
    MAX_HELLO_BYTES,
    MAX_KEYS,
    OFFSET_BYTES,
    Assign,
    Fail,
    FromEngine,
    Hello,
    Lookup,
    Message,
    Pin,
    Reassert,
    Report,
    Revoke,
    Revoked,
    Seal,
    Unpin,
    build_reassertion,
    split_offsets,
)

decode = msgspec.msgpack.Decoder(FromEngine | Revoke).decode
encode = msgspec.msgpack.encode
OFFSETS = bytes(OFFSET_BYTES * MAX_KEYS)
KEYS = bytes(64 * MAX_KEYS)
LONG = "\U0001f600" * 8192
TEXT = LONG[:256]
LONGEST = [
    Unpin(OFFSETS),
    Pin(OFFSETS),
    Seal(2**53, OFFSETS),
    Fail(2**53, OFFSETS, drop=True),
    Assign(2**53, OFFSETS, KEYS, 2**31),
    Lookup(2**53, KEYS, 2**31),
    Reassert(2**53, OFFSETS, OFFSETS, more=True),
    Revoke(OFFSETS),
    Revoked(OFFSETS),
    Report(2**53, 2**53, 2**53, 2**53, 2**53, 2**53, LONG),
]


@pytest.mark.parametrize("message", LONGEST, ids=lambda message: type(message).__name__)
def test_the_longest_message_of_a_kind_is_one_frame_and_one_byte_more_is_refused(message: Message) -> None:
    payload = encode(message)
    pack_frame(payload)
    assert decode(payload) == message
    for name in message.__struct_fields__:
        content = getattr(message, name)
        if isinstance(content, (bytes, str)):
            longer = msgspec.structs.replace(message, **{name: content + content[:1]})
            with pytest.raises(msgspec.ValidationError):
                decode(encode(longer))


def test_the_longest_hello_is_taken_before_it_is_known_who_speaks() -> None:
    hello = Hello(
        protocol_min=1000, protocol_max=1000, engine_id=LONG[:128], role="scheduler", rank=-1, world_size=MAX_RANKS,
        identity=bytes(32), part=LONG[:64], part_bytes=2**53, reason=TEXT, message=LONG, model=TEXT,
        engine_version=TEXT, agent_version=TEXT, process=bytes(16),
    )  # fmt: skip
    assert decode(encode(hello)) == hello
    assert len(encode(hello)) <= MAX_HELLO_BYTES


@pytest.mark.parametrize("num_leases", [0, 1, 8192, 8193, 20_000])
@pytest.mark.parametrize("num_writes", [0, 8193])
def test_a_reassertion_says_all_and_only_its_last_message_says_that_it_is_all(num_leases: int, num_writes: int) -> None:
    pins, writes = packed(num_leases), packed(num_writes)
    messages = build_reassertion(3, pins, writes)
    assert [decode(encode(message)) for message in messages] == messages
    assert [message.more for message in messages] == [True] * (len(messages) - 1) + [False]
    assert b"".join(message.pins for message in messages) == pins
    assert b"".join(message.writes for message in messages) == writes
    assert len(messages) == max(1, -(-max(num_leases, num_writes) // MAX_KEYS))


def packed(count: int) -> bytes:
    return b"".join(number.to_bytes(OFFSET_BYTES, "little") for number in range(count))


def test_offsets_are_split_at_whole_ones() -> None:
    assert [len(piece) // OFFSET_BYTES for piece in split_offsets(packed(20_000))] == [8192, 8192, 3616]
    assert split_offsets(b"") == [b""]
