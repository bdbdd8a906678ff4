"""kubectl plugin of kvoffload."""
