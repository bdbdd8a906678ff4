"""The support bundle of `kubectl kvoffload report`: read, pruned, renamed where that is asked for, and written whole.

contents.gather    what is in it, through `once` (each thing is asked for once), pruned by `kept`
pseudonyms         the same with other names, for --redact
archive            one file, or none
"""
