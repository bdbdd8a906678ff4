"""The index: which key stands in which slot, who leases it, and what may be evicted."""
