"""The kubectl commands of the docs, held against a real kubectl and a real API server with our CRDs.

Files, chart values, helm and our plugin are the unit test's (tests/unit/docs/test_commands.py).
"""

import subprocess

import pytest

from e2e.control_plane import ControlPlane, program
from printed_commands import PrintedCommand, commands_of

pytestmark = pytest.mark.e2e

OF_ONE_KIND = {"get", "describe", "delete", "patch", "label", "explain", "wait"}
"""Verbs whose first word that is no option is a kind, or several with commas, or `kind/name`."""
OF_OTHERS = {"certificate"}
"""cert-manager's, which `docs/troubleshooting.md` speaks of for its mode."""
BEFORE_A_VALUE = ("-n", "-l", "-o", "-p", "-f", "-c", "--type", "--namespace")


def verb_of(command: PrintedCommand) -> tuple[str, list[str]]:
    """The verb, and the words behind it that belong to no option; a namespace may stand before the verb."""
    pairs = zip(command.words, command.words[1:], strict=False)
    verb, *plain = (word for before, word in pairs if before not in BEFORE_A_VALUE and not word.startswith("-"))
    return verb, plain


def test_kubectl_knows_every_option() -> None:
    """It reads all options before it heeds --help, so that nothing is done and nobody is asked."""
    commands = [command for command in commands_of("kubectl") if len(command.words) > 1]
    assert len(commands) > 40
    for command in commands:
        arguments = [*command.words[1:], "--help"]
        done = subprocess.run([program("kubectl"), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert f"kubectl {verb_of(command)[0]} " in done.stdout, command


def test_every_kind_is_one_of_the_api_server_s(control_plane: ControlPlane) -> None:
    known = set(OF_OTHERS)
    for line in control_plane.kubectl("api-resources", "--no-headers").splitlines():
        name, *others = line.split()
        known |= {name, others[-1].lower(), *(others[0].split(",") if len(others) > 3 else ())}
    asked = 0
    for command in commands_of("kubectl"):
        verb, words = verb_of(command) if len(command.words) > 1 else ("", [])
        if verb in OF_ONE_KIND and words:
            for kind in words[0].partition("/")[0].partition(".")[0].split(","):
                assert kind in known, command
                asked += 1
    assert asked > 25
