"""Bounds the work on one pod's text: admission is synchronous, so that no deadline could end what a pod makes long.

Pure; `injection.py` makes one budget for a pod, `command_line.py` and `shell.py` spend it before they make a text.
A script of 150 characters that doubles a variable at each statement would otherwise ask for hundreds of GiB.
"""

from dataclasses import dataclass

from kvoffload.errors import KVOffloadError

MAX_CHARACTERS = 1 << 19
"""Of all containers of a pod: scripts that are split, and words after variables are put in. A long launch script has
10,000; this many take half a second."""
COMMAND_CHARACTERS = 32
"""What one simple command of a script counts for, beside its words."""


class TextTooLong(KVOffloadError):
    """A pod's command lines would take more characters than are read."""


@dataclass(slots=True)
class TextBudget:
    """What is left to read and to make."""

    limit: int = MAX_CHARACTERS
    spent: int = 0

    def spend(self, num_characters: int) -> None:
        """Ask for so many characters before they are read or made. Raises TextTooLong."""
        self.spent += num_characters
        if self.spent > self.limit:
            raise TextTooLong(
                f"the pod's command lines come to more than {self.limit} characters with their variables put in, and "
                "are not read further; start vLLM by a shorter script"
            )
