"""Pure layout arithmetic: pages, rows, the replication gate, identity digests. Standard library only."""
