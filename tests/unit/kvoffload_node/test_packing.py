"""Keys of a message: every length gives its own keys back, and no lengths that a pod chooses fill the memory."""

import tracemalloc

import pytest

from kvoffload.errors import ProtocolError
from kvoffload_node.session.packing import KEYS_OF_FORMAT, unpack_keys


@pytest.mark.parametrize(
    "count", [0, 1, KEYS_OF_FORMAT - 1, KEYS_OF_FORMAT, KEYS_OF_FORMAT + 1, 3 * KEYS_OF_FORMAT, 65536]
)
def test_keys_come_back_in_order(count: int) -> None:
    keys = tuple(number.to_bytes(8, "little") for number in range(count))
    assert unpack_keys(b"".join(keys), 8) == keys


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(ProtocolError):
        unpack_keys(bytes(15), 8)


def test_messages_of_many_lengths_leave_little_behind() -> None:
    tracemalloc.start()
    try:
        for count in range(65536, 65536 - 20, -1):
            unpack_keys(bytes(8 * count), 8)
        left_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left_bytes < 4 << 20
