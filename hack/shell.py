"""Run programs and keep what they said: the only place under `hack/` that starts a foreground process."""

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from hack.console import StepError

TAIL_LINES = 15


def run(
    command: Sequence[str | Path],
    *,
    log: Path | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: str | None = None,
    timeout_seconds: float | None = None,
    accepted_statuses: Collection[int] = (0,),
) -> str:
    """Run a program to its end and return its standard output.

    With `log`, both output streams are appended to that file instead, and the return value is empty. A status that is
    not accepted raises StepError with the last lines that the program wrote.
    """
    arguments = [str(part) for part in command]
    merged = None if environment is None else {**os.environ, **environment}
    try:
        if log is None:
            done = subprocess.run(
                arguments, cwd=cwd, env=merged, input=stdin, capture_output=True, text=True, timeout=timeout_seconds
            )
            output, complaint = done.stdout, done.stderr or done.stdout
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as sink:
                done = subprocess.run(
                    arguments, cwd=cwd, env=merged, input=stdin, stdout=sink, stderr=subprocess.STDOUT, text=True,
                    timeout=timeout_seconds,
                )  # fmt: skip
            output, complaint = "", "" if done.returncode == 0 else log.read_text(errors="replace")
    except FileNotFoundError as error:
        raise StepError(f"{arguments[0]} is not installed", log=log) from error
    except subprocess.TimeoutExpired as error:
        raise StepError(f"{' '.join(arguments)} did not end within {timeout_seconds} s", log=log) from error
    if done.returncode not in accepted_statuses:
        tail = "\n".join(complaint.strip().splitlines()[-TAIL_LINES:])
        raise StepError(f"{' '.join(arguments)} ended with status {done.returncode}:\n{tail}", log=log)
    return output


def is_successful(command: Sequence[str | Path], *, timeout_seconds: float = 10) -> bool:
    """Run a program only for its exit status."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
