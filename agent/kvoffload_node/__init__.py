"""Node daemon: the only allocator of the offload region on its node."""
