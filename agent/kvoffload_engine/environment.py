"""Environment variables that the agent reads. Runs in every vLLM process of an injected pod.

The webhook writes the first five under the names of `kvoffload.api.keys`, which the engine may not load: a test holds
the two together.
"""

SOCKET_VARIABLE = "KVOFFLOAD_SOCKET"
"""Where the node daemon listens; absent: the plugin does nothing."""
POOL_VARIABLE = "KVOFFLOAD_POOL"
REPLICATED_LAYOUT_VARIABLE = "KVOFFLOAD_REPLICATED_LAYOUT"
WEIGHTS_ID_VARIABLE = "KVOFFLOAD_WEIGHTS_ID"
DEADLINE_VARIABLE = "KVOFFLOAD_STEP_DEADLINE_SECONDS"
CHECKSUM_VARIABLE = "KVOFFLOAD_CHECKSUM"
"""By the user alone: `off`, `sampled` or `full`."""
BLOCKS_PER_CHUNK_VARIABLE = "KVOFFLOAD_BLOCKS_PER_CHUNK"
"""By the user alone: how many of vLLM's blocks are offloaded together under one key."""
DECISION_VARIABLE = "KVOFFLOAD_DECISION"
"""By the plugin, for processes that come later."""
