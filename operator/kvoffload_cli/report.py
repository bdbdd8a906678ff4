"""`kubectl kvoffload report`: everything that somebody who cannot see the cluster needs, in one file to send."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvoffload.errors import InvalidSpec
from kvoffload_cli.bundle.archive import write_zip, writing_whole
from kvoffload_cli.bundle.contents import gather
from kvoffload_cli.bundle.parts import Bundle
from kvoffload_cli.kube import ClusterReader
from kvoffload_cli.options import Context, Kubeconfig
from kvoffload_cli.output import escape, make_console, make_table, show_bytes

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def command(
    file: Annotated[Path | None, typer.Option("--file", "-f", help="The zip file; default: named by the time.")] = None,
    logs: Annotated[bool, typer.Option("--logs/--no-logs", help="Read the logs of our pods as well.")] = True,
    since: Annotated[str, typer.Option(help="Logs of this time only, such as 90s, 15m, 1h, 2d; default: any.")] = "",
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace names of namespaces, pods and nodes, each by the same word.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Write a zip file for who helps you.

    What doctor finds, our objects, their events, metrics and logs; of users' pods only our annotations and variables.
    No Secret is read. Status 1 if something could not be read: not-read.json in the file says what and why.
    """
    since_seconds = parse_since(since)
    now = datetime.now(UTC)
    target = file or Path(f"kvoffload-report-{now:%Y%m%dT%H%M%SZ}.zip")
    with writing_whole(target, force=force) as stream:
        reader = ClusterReader(kubeconfig=kubeconfig, context=context)
        bundle = gather(reader, now=now, with_logs=logs, since_seconds=since_seconds, redacts=redact)
        sizes = write_zip(stream, bundle.entries.items(), folder=target.stem, now=now)
    render(make_console(), bundle, sizes, target)
    raise typer.Exit(1 if bundle.failures else 0)


def parse_since(text: str) -> int:
    """Seconds of `90s`, `15m`, `1h`, `2d`; 0 where nothing is asked."""
    if not text:
        return 0
    match = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if match is None:
        raise InvalidSpec(f"--since {text!r} is no time; write 90s, 15m, 1h or 2d")
    return int(match[1]) * SECONDS[match[2]]


def render(console: Console, bundle: Bundle, sizes: dict[str, int], target: Path) -> None:
    """Print what was written, and what could not be read."""
    rows = [(name, bundle.holds[name], show_bytes(num_bytes)) for name, num_bytes in sizes.items()]
    console.print(make_table("FILE", "HOLDS", "BYTES", rows=rows))
    for sentence in bundle.left_out:
        console.print(f"left out: {escape(sentence)}", soft_wrap=True)
    for what, reason in bundle.failures:
        console.print(f"not read: {escape(what)}: {escape(reason)}", soft_wrap=True)
    console.print(f"{escape(str(target))} is written, for you alone to read; look through it before you send it")
