"""What the node has: hugepages, limits, NUMA nodes. A path in, a value out."""
