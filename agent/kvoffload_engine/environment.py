"""Environment variables that the agent reads. Runs in every vLLM process of an injected pod.

The webhook writes the first five under the names of `kvoffload.api.keys`, which the engine may not load: a test holds
the two together.
"""

from collections.abc import Mapping

from kvoffload_engine.log import logger

SOCKET_VARIABLE = "KVOFFLOAD_SOCKET"
"""Where the node daemon listens; absent: the plugin does nothing."""
POOL_VARIABLE = "KVOFFLOAD_POOL"
REPLICATED_LAYOUT_VARIABLE = "KVOFFLOAD_REPLICATED_LAYOUT"
PREDICTED_LAYOUTS = ("auto", "replicated", "per-rank")
"""Only the last decides anything: it is a veto."""
WEIGHTS_ID_VARIABLE = "KVOFFLOAD_WEIGHTS_ID"
DEADLINE_VARIABLE = "KVOFFLOAD_STEP_DEADLINE_SECONDS"
CHECKSUM_VARIABLE = "KVOFFLOAD_CHECKSUM"
"""By the user alone: `off`, `sampled` or `full`."""
BLOCKS_PER_CHUNK_VARIABLE = "KVOFFLOAD_BLOCKS_PER_CHUNK"
"""By the user alone: how many of vLLM's blocks are offloaded together under one key."""
DECISION_VARIABLE = "KVOFFLOAD_DECISION"
"""By the plugin, for processes that come later."""


def is_replication_allowed(environment: Mapping[str, str]) -> bool:
    """Whether the engine may find that its ranks share one copy; anything unknown is `auto`."""
    layout = environment.get(REPLICATED_LAYOUT_VARIABLE, "") or "auto"
    if layout not in PREDICTED_LAYOUTS:
        known = ", ".join(PREDICTED_LAYOUTS)
        logger.warning("kvoffload: %s is %.100r, needed %s: auto is used", REPLICATED_LAYOUT_VARIABLE, layout, known)
    return layout != "per-rank"
