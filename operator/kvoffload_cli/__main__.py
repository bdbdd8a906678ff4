"""`kubectl kvoffload` (or `kubectl-kvoffload`): the plugin's entry point. Runs on the administrator's machine.

Exit status: 0 all is well, 1 something was found or not read, 2 the command could not do its work.
"""

import sys
from importlib import metadata
from typing import Annotated

import typer
from rich.console import Console

from kvoffload.errors import KVOffloadError
from kvoffload_cli import doctor, explain, plan, report, status, top
from kvoffload_cli.output import make_printable

app = typer.Typer(
    name="kubectl kvoffload",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.", is_eager=True)] = False,
) -> None:
    """Plan, check and watch the hugepage pools that vLLM engines offload their KV cache to."""
    if version:
        typer.echo(metadata.version("kvoffload"))
        raise typer.Exit


EXAMPLE = "Example: kubectl kvoffload "

app.command("plan", epilog=f"{EXAMPLE}plan -m config.json --tp 8 --node-memory 1Ti")(plan.command)
app.command("doctor", epilog=f"{EXAMPLE}doctor -o json")(doctor.command)
app.command("status", epilog=f"{EXAMPLE}status llm")(status.command)
app.command("top", epilog=f"{EXAMPLE}top --interval 5")(top.command)
app.command("report", epilog=f"{EXAMPLE}report --since 1h --redact")(report.command)
app.add_typer(explain.app, name="explain")


def main() -> None:
    """Run the command line; what is wrong with the input or the cluster is one line on standard error and status 2."""
    try:
        app()
    except KVOffloadError as error:
        for line in f"error: {error}".splitlines():
            Console(stderr=True, highlight=False).print(make_printable(line), markup=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
