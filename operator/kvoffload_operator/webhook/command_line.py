"""vLLM's arguments as far as a manifest tells them: from command, args, env and `sh -c` strings. Pure.

Called by `prediction.py`. What cannot be told (a launcher script, a variable from a Secret, a `--config` file) is
unknown and stays unknown: the engine then decides alone. Nothing is ever put back together from what is parsed here.

    command + args --> words --> `sh -c` script --> simple commands --> the one that starts vLLM --> options
         $(VAR) by the kubelet         $VAR, ${VAR}, "$@" by the shell
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvoffload_operator.webhook.shell import ASSIGNMENT, UNKNOWN, simple_commands
from kvoffload_operator.webhook.text_budget import TextBudget, TextTooLong

SHELLS = frozenset({"sh", "bash", "ash", "dash", "zsh", "ksh"})
_KUBELET_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")

OPTIONS = frozenset(
    {
        "model",
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "decode-context-parallel-size",
        "prefill-context-parallel-size",
        "data-parallel-size",
        "nnodes",
        "node-rank",
        "distributed-executor-backend",
        "kv-transfer-config",
        "kv-offloading-size",
        "speculative-config",
        "hf-overrides",
        "config",
        "headless",
        "enable-sleep-mode",
    }
)
"""Long options that matter here."""
SHORT_OPTIONS = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-dp": "data-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
    "-sc": "speculative-config",
}
MIN_ABBREVIATION = 8
"""vLLM's argparse takes unique prefixes of options; shorter ones than this are ambiguous there."""
MAX_SCRIPT_LENGTH = 128 * 1024
MAX_SHELL_DEPTH = 3


class Launch(StrEnum):
    """How sure it is that a container runs vLLM."""

    VLLM = "vllm"
    """Its command line starts vLLM's server."""
    IMAGE = "image"
    """No command, and an image whose name says vLLM: its entry point is the server."""
    UNKNOWN = "unknown"
    """A launcher whose inside cannot be seen."""
    OTHER = "other"
    """Its command is something else that is well known."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What is known of a container's vLLM."""

    launch: Launch
    options: Mapping[str, str | None] = field(default_factory=dict)
    """Options given, by long name; None is a value that cannot be told."""
    is_complete: bool = True
    """Whether all options are known: False after a `--config` file, `"$@"` of unknown content or the like."""
    uses_ray: bool = False
    """Whether the script starts Ray."""
    unread: str = ""
    """Why it was not read to its end, where it grows beyond all measure; empty otherwise."""

    def number(self, name: str, default: int) -> int | None:
        """An integer option; None where it cannot be told."""
        if name not in self.options:
            return default if self.is_complete else None
        value = self.options[name]
        try:
            return int(value) if value is not None else None
        except ValueError:
            return None

    def text(self, name: str) -> str | None:
        """A string option, None if absent or untold."""
        return self.options.get(name)

    def has(self, name: str) -> bool:
        """Whether the option, or a dotted part of it, is given."""
        return name in self.options or any(option.startswith(f"{name}.") for option in self.options)


def parse_command_line(
    command: Sequence[str],
    args: Sequence[str],
    environment: Mapping[str, str | None],
    image: str = "",
    *,
    budget: TextBudget | None = None,
) -> CommandLine:
    """Find vLLM's arguments. `environment` maps names to literal values, None where they come from elsewhere.

    `budget` is the pod's, a new one unless given; where it is spent, the command line is unknown.
    """
    budget = budget or TextBudget()
    try:
        words = [_expand_kubelet(word, environment, budget) for word in (*command, *args)]
        if command:
            return _parse_words(words, environment, budget, depth=0)
    except TextTooLong as error:
        return CommandLine(Launch.UNKNOWN, is_complete=False, unread=str(error))
    found = _find_vllm(words)
    if found is None and "vllm" not in image.lower():
        return CommandLine(Launch.UNKNOWN, is_complete=False)
    options, complete = _parse_options(words if found is None else found)
    return CommandLine(Launch.IMAGE if found is None else Launch.VLLM, options, complete)


def _parse_words(
    words: Sequence[str], environment: Mapping[str, str | None], budget: TextBudget, *, depth: int
) -> CommandLine:
    script = _shell_script(words)
    if script is None:
        found = _find_vllm(words)
        if found is None:
            launch = Launch.OTHER if _is_well_known(words) else Launch.UNKNOWN
            return CommandLine(launch, is_complete=False)
        options, complete = _parse_options(found)
        return CommandLine(Launch.VLLM, options, complete)
    text, positional = script
    if UNKNOWN in text or len(text) > MAX_SCRIPT_LENGTH or depth >= MAX_SHELL_DEPTH:
        return CommandLine(Launch.UNKNOWN, is_complete=False)
    uses_ray = False
    for simple in simple_commands(text, environment, positional, budget):
        uses_ray = uses_ray or _starts_ray(simple)
        inner = _parse_words(simple, environment, budget, depth=depth + 1) if simple else None
        if inner is not None and inner.launch is Launch.VLLM:
            return CommandLine(Launch.VLLM, inner.options, inner.is_complete, uses_ray or inner.uses_ray)
    return CommandLine(Launch.UNKNOWN, is_complete=False, uses_ray=uses_ray)


def _expand_kubelet(word: str, environment: Mapping[str, str | None], budget: TextBudget) -> str:
    """`$(VAR)` as the kubelet expands it: a name it does not know stays as it stands, `$$` is one dollar."""
    budget.spend(len(word) + 1)

    def expand(match: re.Match[str]) -> str:
        if match.group(0) == "$$":
            return "$"
        name = match.group(1)
        if name not in environment:
            return match.group(0)
        value = environment[name]
        if value is None:
            return UNKNOWN
        budget.spend(len(value))
        return value

    return _KUBELET_VARIABLE.sub(expand, word)


def _shell_script(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """Script and positional parameters (from $0 on) of `sh -c SCRIPT NAME ...`, None if it is no such call."""
    rest = list(_without_wrappers(words))
    if not rest or rest[0].rpartition("/")[2] not in SHELLS:
        return None
    index = 1
    while index < len(rest) and rest[index].startswith(("-", "+")) and rest[index] not in ("-", "--"):
        flags = rest[index]
        index += 1
        if flags.endswith(("o", "O")) and not flags.startswith("--"):
            index += 1  # `-o pipefail`, also in `-euo pipefail`
        elif not flags.startswith("--") and "c" in flags[1:]:
            return (rest[index], rest[index + 1 :]) if index < len(rest) else None
    return None


_WRAPPERS = frozenset(
    {"exec", "nohup", "env", "command", "time", "tini", "dumb-init", "nice", "stdbuf", "sudo", "setsid"}
)
_WRAPPERS_WITH_ARGUMENTS = frozenset({"numactl", "taskset", "timeout", "catchsegv", "nsys", "opentelemetry-instrument"})


def _without_wrappers(words: Sequence[str]) -> Sequence[str]:
    """Drop leading assignments and programs that only start another."""
    index = 0
    while index < len(words):
        word = words[index]
        name = word.rpartition("/")[2]
        if (
            ASSIGNMENT.match(word)
            or name in _WRAPPERS
            or (index and word in ("--", "-"))
            or (index and words[index - 1].rpartition("/")[2] in _WRAPPERS and word.startswith("-"))
        ):
            index += 1
        else:
            break
    return words[index:]


def _find_vllm(words: Sequence[str]) -> Sequence[str] | None:
    """What follows the server's name in a command that starts vLLM's server; None if it does not."""
    rest = list(_without_wrappers(words))
    if rest and rest[0].rpartition("/")[2] in _WRAPPERS_WITH_ARGUMENTS:
        starts = [index for index, word in enumerate(rest) if index and _names_program(word)]
        rest = rest[starts[0] :] if starts else rest
    for index, word in enumerate(rest):
        name = word.rpartition("/")[2]
        if name == "vllm" and index + 1 < len(rest) and rest[index + 1] in ("serve", "bench", "run-batch", "chat"):
            return rest[index + 2 :] if rest[index + 1] == "serve" else None
        if word == "-m" and index + 1 < len(rest):
            module = rest[index + 1]
            return rest[index + 2 :] if module.startswith(("vllm.entrypoints", "vllm_")) else None
        if name == "api_server.py" and "vllm" in word:
            return rest[index + 1 :]
    return None


def _names_program(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name == "vllm" or name.startswith("python") or name in SHELLS


def _starts_ray(words: Sequence[str]) -> bool:
    rest = _without_wrappers(words)
    return any("ray_cluster" in word or "--ray" in word for word in rest) or (
        len(rest) > 1 and rest[0].rpartition("/")[2] == "ray" and rest[1] == "start"
    )


def _is_well_known(words: Sequence[str]) -> bool:
    rest = _without_wrappers(words)
    return bool(rest) and rest[0].rpartition("/")[2] in (
        "sleep",
        "nginx",
        "envoy",
        "istio-proxy",
        "pause",
        "tail",
        "cat",
    )


def _parse_options(words: Sequence[str]) -> tuple[dict[str, str | None], bool]:
    """Options by long name, and whether they are all there is. A later one replaces an earlier one, as in argparse."""
    options: dict[str, str | None] = {}
    complete = True
    index = 0
    if words and not words[0].startswith("-"):
        options["model"] = None if UNKNOWN in words[0] else words[0]
        index = 1
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-"):
            complete = complete and UNKNOWN not in word
            continue
        flag, has_value, value = word.partition("=")
        if UNKNOWN in flag:
            complete = False
            continue
        name = _long_name(flag)
        if name is None:
            continue
        if not has_value:
            follows = index < len(words) and not _is_flag(words[index])
            value = words[index] if follows else ""
            index += follows
        if name == "config":
            complete = False  # the file is in the image or a volume
        options[name] = None if UNKNOWN in value else value
    return options, complete


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-[0-9.]+", word)


def _long_name(flag: str) -> str | None:
    if flag in SHORT_OPTIONS:
        return SHORT_OPTIONS[flag]
    if not flag.startswith("--"):
        return None
    name, dot, rest = flag[2:].partition(".")
    name = name.replace("_", "-")
    if name in OPTIONS:
        return name + dot + rest
    if len(name) >= MIN_ABBREVIATION:
        longer = [option for option in OPTIONS if option.startswith(name)]
        if len(longer) == 1:
            return longer[0] + dot + rest
    return None
