"""How much of the daemon's memory connections may hold: those of one pod, and those of all pods together.

Runs in the node daemon; `registry.py` has one `Budget` for connections and one for their bytes, `connection.py` keeps
to them.

    bytes of one connection    received, and no whole frame yet, or not its turn yet    a frame and one read
                               sent, and not read by the peer                           an answer, and what is pushed

Where all pods together hold too much, only those lose connections that hold more than an equal share: a pod that holds
little is not harmed by what others hold.
"""

from dataclasses import dataclass

MAX_CONNECTIONS_OF_POD = 1024
"""64 engines of eight ranks need 576."""
MAX_CONNECTIONS = 4096
MAX_BYTES_OF_POD = 32 << 20
"""The longest frames of 64 schedulers, or of 500 ranks, at one moment."""
MAX_BYTES = 256 << 20
SEND_BUFFER_BYTES = 32 << 10
"""Of each socket, in the kernel, which takes twice that; where the peer does not read it is the daemon's memory too."""


@dataclass(slots=True)
class Budget:
    """What pods hold of one thing, and what they may."""

    max_of_pod: int
    max_of_all: int
    total: int = 0
    """What all pods hold now."""

    def allowed(self, num_pods: int) -> int:
        """What one of so many pods may hold now."""
        if self.total <= self.max_of_all:
            return self.max_of_pod
        return min(self.max_of_pod, self.max_of_all // max(1, num_pods))
