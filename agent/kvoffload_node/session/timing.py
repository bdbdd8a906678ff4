"""How long messages take, counted as cheaply as it can be: one comparison and one addition a message.

Runs in the node daemon; filled by `connection.py`, translated by `metrics.py`.
"""

from bisect import bisect_left

BUCKETS_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1)


class Durations:
    """A histogram of one kind of message."""

    __slots__ = ("counts", "sum_seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one message."""
        self.counts[bisect_left(BUCKETS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds
