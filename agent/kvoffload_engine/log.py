"""The agent's logger: below vLLM's own, whose handlers and level are the ones that a user sees and sets."""

import logging

logger = logging.getLogger("vllm.kvoffload")
