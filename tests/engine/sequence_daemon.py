"""The daemon of `sequence_checks.py`, and all that these may do to it. Used by `test_no_model.py`."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess

MIB = 1 << 20
CAPACITIES = {"small pool": 4 * MIB, "middle pool": 6 * MIB, "large pool": 10 * MIB}
"""Two to five extents."""
DEFAULTS: dict[str, Any] = {"mode": "Active", "replicatedLayout": "Auto", "quotas": [], "maxEngines": 64}
LIMITS = [{"namespace": "default", "limitBytes": MIB}, {"namespace": "other", "limitBytes": 2 * MIB}]
GUARANTEE = [{"namespace": "default", "guaranteedBytes": 3 * MIB, "limitBytes": 8 * MIB}]
CHANGES: dict[str, dict[str, Any]] = {
    "default spec": DEFAULTS,
    "pause": {"mode": "Paused"},
    "resume": {"mode": "Active"},
    "observe": {"mode": "Observe"},
    "never replicate": {"replicatedLayout": "Never"},
    "replicate": {"replicatedLayout": "Auto"},
    "quota": {"quotas": LIMITS},
    "guarantee": {"quotas": GUARANTEE},
    "no quota": {"quotas": []},
    "few engines": {"maxEngines": 2},
    "many engines": {"maxEngines": 64},
    **{name: {"capacityBytes": num_bytes} for name, num_bytes in CAPACITIES.items()},
}
COMPLAINT = re.compile(r"a bug of this daemon|^Traceback|connection ended: ", re.MULTILINE)
"""In its log: a bug of its own, or something that our own engines may not send."""


class SequenceDaemon(DaemonProcess):
    """A daemon with two pods, of two Kubernetes namespaces."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, capacity_bytes=CAPACITIES["middle pool"])
        self._anew_at = 0

    def __enter__(self) -> "SequenceDaemon":
        super().__enter__()
        self.socket = self.attach("pod-toy")
        self.attach("pod-other", namespace="other")
        return self

    def begin_anew(self, sharing: str) -> None:
        """Another life: nothing is left of the one before."""
        self.kill()
        self._anew_at = len(self.log)
        for folder in (self.state, self.mount / f"kvoffload-{self.pool}"):
            shutil.rmtree(folder, ignore_errors=True)
        self.state.mkdir()
        self.write_spec(**DEFAULTS, capacityBytes=CAPACITIES["middle pool"], sharing=sharing)
        self.start()

    def complaints(self) -> str:
        """Lines of its log, since it was begun anew, that should not be there."""
        lines = self.log[self._anew_at :].splitlines()
        return json.dumps([line for line in lines if COMPLAINT.search(line)])

    def deeds(self) -> dict[str, Callable[[], str | None]]:
        """By the names that checks say."""
        return {
            "kill": self.kill,
            "terminate": self.stop,
            "start": self.start,
            "stop": lambda: self._signal(signal.SIGSTOP),
            "continue": lambda: self._signal(signal.SIGCONT),
            "anew": lambda: self.begin_anew("Pool"),
            "anew by namespace": lambda: self.begin_anew("Namespace"),
            "complaints": self.complaints,
            "dump": lambda: json.dumps(self.metrics()),
            **{name: lambda change=change: self.write_spec(**change) for name, change in CHANGES.items()},
        }

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
