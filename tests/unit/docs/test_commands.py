"""What the docs tell people to type is there: targets, files, chart values, options of helm and of our plugin.

kubectl's own options and kinds are held against a real one by tests/e2e/test_printed_commands.py.
"""

import importlib.util
import json
import re
import subprocess
from typing import Any

import pytest
import tomllib
import yaml
from typer.testing import CliRunner

from hack.cache import REPOSITORY
from hack.chart import find_chart_tools
from kvoffload_cli.__main__ import app
from printed_commands import PrintedCommand, commands_of, documentation_pages, split_commands

CHART = REPOSITORY / "charts" / "kvoffload"
MADE_BY_A_COMMAND = {"build/demo/manifests": "make demo"}
"""Files that a page names and that no clone has, with the command that writes them."""
IN_PROSE = ("SUBSTITUTED", "hack.<part>")


def texts() -> dict[str, str]:
    return {str(page.relative_to(REPOSITORY)): page.read_text() for page in documentation_pages()}


def options_of(command: PrintedCommand, *names: str) -> list[str]:
    """The values of an option, by any of its names."""
    following = zip(command.words, command.words[1:], strict=False)
    joined = [word.partition("=")[2] for word in command.words if word.startswith(tuple(f"{name}=" for name in names))]
    return [value for word, value in following if word in names] + joined


def has_value(key: str) -> bool:
    """Whether the chart has a value of that name, or an object that takes names of the user's own."""
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    for part in key.split("."):
        if part not in schema.get("properties", {}):
            return schema.get("additionalProperties", True) is not False and "properties" not in schema
        schema = schema["properties"][part]
    return True


def test_commands_are_split_as_a_shell_does() -> None:
    text = 'eval "$(make -s env)"; A=1 kubectl get pods \\\n  -l "a=b c"  # make tea\necho make | helm list 2>/dev/null'
    assert list(split_commands(text)) == [
        ("make", "-s", "env"),
        ("kubectl", "get", "pods", "-l", "a=b c"),
        ("helm", "list"),
    ]


def test_every_make_target_is_there() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    commands = commands_of("make")
    assert len(commands) > 20
    for command in commands:
        named = {word for word in command.words[1:] if not word.startswith("-")}
        assert named <= targets, command


def test_every_module_that_python_is_to_run_is_there() -> None:
    commands = [command for command in commands_of("python") + commands_of(".venv/bin/python") if "-m" in command.words]
    assert len(commands) > 5
    for command in commands:
        (module,) = options_of(command, "-m")
        assert module in IN_PROSE or importlib.util.find_spec(module), command


def test_every_extra_that_pip_is_to_install_is_there() -> None:
    extras = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = {name for text in texts().values() for name in re.findall(r"install '\.\[(\w+)\]'", text)}
    assert named
    assert named <= extras


def test_every_file_that_a_command_reads_is_there() -> None:
    commands = commands_of("kubectl") + commands_of("helm")
    named = [(command, path) for command in commands for path in options_of(command, "-f", "--filename", "--values")]
    named += [(command, word) for command in commands for word in command.words if word.startswith("charts/")]
    assert len(named) > 5
    for command, path in named:
        assert path in MADE_BY_A_COMMAND or (REPOSITORY / path).exists(), command


def test_every_chart_value_that_helm_is_given_is_there() -> None:
    given = [(command, one) for command in commands_of("helm") for one in options_of(command, "--set", "--set-string")]
    assert len(given) > 10
    for command, one in given:
        for pair in one.split(","):
            assert has_value(pair.partition("=")[0]), command


def test_every_chart_value_that_a_page_names_is_there() -> None:
    """A name with a point whose first part is a value at the top; prose may say what it is set to behind it."""
    top = yaml.safe_load((CHART / "values.yaml").read_text())
    several = "|".join(name for name, value in top.items() if isinstance(value, dict) and value)
    named = {
        (page, key)
        for page, text in texts().items()
        if page != "ARCHITECTURE.md"  # names modules, of which some begin with `webhook.`
        for key in re.findall(rf"`(?:--set )?((?:{several})\.\w[\w.]*)(?:[=:][^`]*)?`", text)
    }
    assert len({key for _, key in named}) > 20
    assert [(page, key) for page, key in sorted(named) if not has_value(key)] == []


def test_the_chart_is_installed_by_the_same_commands_on_every_page() -> None:
    of_pages: dict[str, list[tuple[str, ...]]] = {}
    for page, text in texts().items():
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            if "helm install" in block:
                words = [
                    tuple("-n" if word == "--namespace" else word for word in one) for one in split_commands(block)
                ]
                of_pages[page] = [one for one in words if "kvoffload" not in one[:2]]
    assert set(of_pages) == {"README.md", "charts/kvoffload/README.md", "docs/install.md"}
    assert len({str(words) for words in of_pages.values()}) == 1


def test_every_option_of_helm_is_one_that_it_knows() -> None:
    """cobra parses the whole command line before it heeds --help, so that nothing is done and nothing is asked."""
    tools = find_chart_tools()
    if not tools.helm.exists():
        pytest.skip("needs helm: `python -m hack.chart` builds it")
    for command in commands_of("helm"):
        done = subprocess.run([tools.helm, *command.words[1:], "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert f"helm {command.words[1]} " in done.stdout, command


def test_every_command_of_the_plugin_and_its_options_are_there() -> None:
    """Its parser, too, reads all options before it heeds --help."""
    commands = commands_of("kubectl kvoffload")
    assert len(commands) > 20
    for command in commands:
        result = CliRunner().invoke(app, [*command.words[2:], "--help"])
        assert result.exit_code == 0, f"{command}\n{result.output}"


def test_every_plan_that_a_page_shows_whole_runs() -> None:
    commands = [command for command in commands_of("kubectl kvoffload plan") if len(command.words) > 3]
    assert len(commands) > 3
    for command in commands:
        result = CliRunner().invoke(app, list(command.words[2:]))
        assert result.exit_code == 0, f"{command}\n{result.output}"
