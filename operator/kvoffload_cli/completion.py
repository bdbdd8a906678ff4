"""`kubectl_complete-kvoffload`: what kubectl's own shell completion runs to complete `kubectl kvoffload ...`.

kubectl gives the words after the plugin's name, the last one as far as it is typed, and reads one proposal a line, at
the end `:` and cobra's directive. (Without kubectl: `kubectl-kvoffload --install-completion`, by typer.)
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from kvoffload_cli.__main__ import app
from kvoffload_cli.models import packaged_models
from kvoffload_cli.output import OutputFormat
from kvoffload_cli.sizing import PAGE_BYTES

DEFAULT, NO_FILES = 0, 4
"""Cobra's directives: let the shell propose files as well, or not."""

VALUES: dict[str, Callable[[], list[str]]] = {
    "model": packaged_models,
    "page_size": lambda: list(PAGE_BYTES),
    "output": lambda: [one.value for one in OutputFormat],
}
"""Proposals for the values of options, by the parameter's name; where there are none the shell proposes files."""


def main() -> None:
    """Print the proposals for the words on the command line."""
    proposals, directive = complete(sys.argv[1:])
    sys.stdout.write("".join(f"{proposal}\n" for proposal in proposals) + f":{directive}\n")


def complete(words: Sequence[str]) -> tuple[list[str], int]:
    """Proposals that begin with the last word: commands, option names, or values of the option before it."""
    command: Any = typer.main.get_command(app)
    *typed, current = words or [""]
    for word in typed:
        command = getattr(command, "commands", {}).get(word, command)
    option = next((one for one in command.params if typed and typed[-1] in one.opts and not one.is_flag), None)
    if option is not None:
        values = VALUES[option.name]() if option.name in VALUES else []
        return [value for value in values if value.startswith(current)], NO_FILES if values else DEFAULT
    if current.startswith("-"):
        names = sorted(name for one in command.params for name in one.opts if name.startswith("--"))
        return [name for name in names if name.startswith(current)], NO_FILES
    return [name for name in getattr(command, "commands", {}) if name.startswith(current)], NO_FILES
