"""`kubectl_complete-kvoffload`: what kubectl's own shell completion runs to complete `kubectl kvoffload ...`.

kubectl gives the words after the plugin's name, the last one as far as it is typed, and reads one proposal a line, at
the end `:` and cobra's directive. (Without kubectl: `kubectl-kvoffload --install-completion`, by typer.)
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from kvoffload.api import keys
from kvoffload.errors import KVOffloadError
from kvoffload_cli.__main__ import app
from kvoffload_cli.kube import ClusterReader, Reader
from kvoffload_cli.models import packaged_models
from kvoffload_cli.observation import POOLS
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

ARGUMENTS: dict[tuple[str, str], Callable[[Reader, str, str], list[str]]] = {
    ("status", "pool"): lambda reader, _namespace, _current: name_pools(reader),
    ("pod", "name"): lambda reader, namespace, current: name_labelled_pods(reader, namespace, current),
}
"""Proposals out of the cluster for arguments, by the command's and the parameter's name."""
PATIENCE_SECONDS = 3.0
"""How long a shell waits for the cluster when Tab is pressed."""


def main() -> None:
    """Print the proposals for the words on the command line."""
    proposals, directive = complete(sys.argv[1:])
    sys.stdout.write("".join(f"{proposal}\n" for proposal in proposals) + f":{directive}\n")


def complete(words: Sequence[str]) -> tuple[list[str], int]:
    """Proposals that begin with the last word: commands, option names, values of the option before it, or arguments."""
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
    names = [*getattr(command, "commands", {}), *propose_arguments(command, typed, current)]
    return [name for name in names if name.startswith(current)], NO_FILES


def propose_arguments(command: Any, typed: Sequence[str], current: str) -> list[str]:
    """What the cluster has for the command's argument; nothing where it does not answer, or not this user."""
    propose = next((ARGUMENTS[key] for one in command.params if (key := (command.name, one.name)) in ARGUMENTS), None)
    if propose is None:
        return []
    typed = [part for word in typed for part in (word.split("=", 1) if word.startswith("--") else [word])]
    given = {
        one.name: value
        for one in command.params
        for name, value in itertools.pairwise(typed)
        if name in one.opts and one.name in ("kubeconfig", "context", "namespace")
    }
    namespace = given.pop("namespace", "")
    try:
        reader = ClusterReader(**given, timeout_seconds=PATIENCE_SECONDS)
        return propose(reader, namespace or reader.namespace, current)
    except KVOffloadError:
        return []


def name_pools(reader: Reader) -> list[str]:
    """Names of the pools."""
    return sorted(one["metadata"]["name"] for one in reader.list_objects(POOLS))


def name_labelled_pods(reader: Reader, namespace: str, current: str) -> list[str]:
    """Labelled pods: of the namespace that is typed already as NAMESPACE/NAME, otherwise of this one by NAME."""
    typed, slash, _ = current.partition("/")
    path = f"/api/v1/namespaces/{typed if slash else namespace}/pods"
    names = sorted(one["metadata"]["name"] for one in reader.list_objects(path, labels=keys.POOL_LABEL))
    return [f"{typed}/{name}" for name in names] if slash else names
