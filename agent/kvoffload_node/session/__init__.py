"""Sessions: the sockets of attached pods, and what comes through them."""
