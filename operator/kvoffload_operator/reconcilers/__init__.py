"""One file per kind: observe, plan, apply."""
