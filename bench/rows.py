"""One row of the table, and how a series of measurements becomes one."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    """A series of measurements of one thing."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Measured":
        """Median, and the tenth and ninetieth percentile as spread."""
        ordered = sorted(values)
        return cls(
            statistics.median(ordered),
            ordered[len(ordered) // 10],
            ordered[-1 - len(ordered) // 10],
            len(ordered),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of ours beside a reference of the same run."""

    name: str
    unit: str
    ours: Measured
    reference: Measured | None
    reference_name: str
    target: str
    """In words; `met` says whether it is."""
    met: bool

    @property
    def ratio(self) -> float | None:
        """Ours by the reference's."""
        return None if self.reference is None else self.ours.median / self.reference.median

    def to_json(self) -> dict[str, object]:
        """As it stands in results.json."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours.median,
            "reference": self.reference.median if self.reference else None,
            "reference_name": self.reference_name,
            "ratio": self.ratio,
            "target": self.target,
            "met": self.met,
            "ours_p10": self.ours.low,
            "ours_p90": self.ours.high,
            "samples": self.ours.count,
        }
