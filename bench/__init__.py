"""Figures of the node daemon, measured beside vLLM's own manager in the same run: `make bench`."""
