"""Pure checks, each named for the violation it finds, in ordered chains."""
