"""A device for `ToyEngine`'s ranks whose memory is this process's own: it copies at once, says that a copy is done when
the check lets it, registers pages in a set, and writes the calls down whose order is asked about."""

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import torch

from kvoffload_engine.transfer.plan import CopyPlan


class ToyDevice:
    """The `Device` of `kvoffload_engine.transfer.cuda`."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.registered: set[int] = set()
        self.calls: list[str] = []
        self.copies_are_done = True
        self.may_unregister = threading.Event()
        self.may_unregister.set()

    def current_stream(self) -> None:
        """The model's: nothing runs there."""

    def new_stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)

    def new_event(self) -> Any:
        return SimpleNamespace(
            record=lambda stream: None,
            query=lambda: self.copies_are_done,
            synchronize=self._synchronize,
            elapsed_time=lambda end: 1.0,
        )

    def _synchronize(self) -> None:
        self.calls.append("synchronize")
        self.copies_are_done = True

    def new_descriptors(self, num_copies: int) -> Any:
        return torch.empty((3, num_copies), dtype=torch.int64)

    def copy(self, stream: Any, descriptors: Any, plan: CopyPlan, *, to_region: bool) -> None:
        self.calls.append("copy")
        host, device = plan.host_addresses.tolist(), plan.device_addresses.tolist()
        targets, sources = (host, device) if to_region else (device, host)
        for target, source, num_bytes in zip(targets, sources, plan.num_bytes.tolist(), strict=True):
            ctypes.memmove(target, source, num_bytes)

    def register(self, address: int, num_bytes: int) -> str:
        if not self.refuses:
            self.registered.add(address)
        return self.refuses

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")
        assert self.may_unregister.wait(20)
        self.registered.remove(address)
