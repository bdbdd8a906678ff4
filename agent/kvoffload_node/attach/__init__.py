"""The attacher: a process of its own that finds opted-in pods and gives each a socket and the library."""
