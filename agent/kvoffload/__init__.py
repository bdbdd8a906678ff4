"""Shared core of kvoffload: what the operator, the node daemon and the engine agent agree on."""

__version__ = "0.1.0"
