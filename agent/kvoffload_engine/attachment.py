"""The lock by which the node daemon knows that this process lives, from one session to the next.

Runs in vLLM's engine core and workers, in the thread of the session's connector; used by
`kvoffload_engine.reassertion` (scheduler) and `kvoffload_engine.worker_link`. Each `Welcome` brings a locked
descriptor, and the kernel lets go of the lock with the process; a session that comes to nothing must not cost the lock
of the last one.

    Welcome ──> reassert ──> the new lock is kept, the old one closed
                   │ raises
                   └───────> the new lock is closed, the old one kept: it still says that we are alive

A connector may be at it when its owner ends: what comes after `close` is not kept, or a process that goes on would hold
for ever what this engine held.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class AttachmentLock:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.descriptor = -1
        """-1 before the first session and after `close`."""
        self._is_closed = False
        self._changing = threading.Lock()

    @contextmanager
    def succeeded_by(self, descriptor: int) -> Iterator[None]:
        """Keep this lock in the place of the one before, once what is done inside has not raised."""
        try:
            yield
        except BaseException:
            os.close(descriptor)
            raise
        with self._changing:
            if self._is_closed:
                old = descriptor
            else:
                old, self.descriptor = self.descriptor, descriptor
        if old >= 0:
            os.close(old)

    def close(self) -> None:
        """This process touches the region no more."""
        with self._changing:
            self._is_closed = True
            old, self.descriptor = self.descriptor, -1
        if old >= 0:
            os.close(old)
