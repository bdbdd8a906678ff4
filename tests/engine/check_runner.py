"""Runs the checks of one file. No pytest here: it runs under the Python of a vLLM environment.

`python FILE SOCKET FOLDER [NAME ...]` prints one JSON object, {check: "ok" or the traceback}. SOCKET is a daemon's;
checks that take a `Control` beside it speak to whoever runs that daemon through named pipes in FOLDER.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKS: dict[str, Callable[..., None]] = {}


def check(function: Callable[..., None]) -> Callable[..., None]:
    CHECKS[function.__name__] = function
    return function


class Control:
    """Whoever runs the daemon, through two named pipes: the scripted one itself, or the test, which does to the real
    one what it is told: `kill`, `start`, `stop` (SIGSTOP), `continue`, `dump` (its metrics), `pause` its pool ..."""

    def __init__(self, folder: Path) -> None:
        self.commands = (folder / "commands").open("w")
        self.answers = (folder / "answers").open()

    def say(self, command: str) -> str:
        self.commands.write(command + "\n")
        self.commands.flush()
        return self.answers.readline()

    def dump(self) -> dict[str, Any]:
        return json.loads(self.say("dump"))


def run_checks(*, with_control: bool) -> None:
    socket_path, folder, *names = sys.argv[1:]
    extra = [Control(Path(folder))] if with_control else []
    results = {}
    for name in names or CHECKS:
        try:
            CHECKS[name](socket_path, *extra)
            results[name] = "ok"
        except Exception:  # noqa: BLE001 - the test that started this prints it
            results[name] = traceback.format_exc()
    print("RESULTS " + json.dumps(results), flush=True)
