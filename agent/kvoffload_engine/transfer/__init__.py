"""Copies between a worker's KV cache and the mapped region: the plan, and its two backends."""
