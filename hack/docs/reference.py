"""Everything in docs/ that is made from code: metrics, settings, chart values, the kubectl plugin, the sizing tables,
the examples that pages show, and the chart's README.md.

python -m hack.docs.reference            write
python -m hack.docs.reference --check    fail where a page differs
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from hack.docs import excerpts
from hack.docs.api_page import build_api_page
from hack.docs.metrics_page import build_page
from hack.docs.settings_page import HEADER, build_chart_readme, build_settings_page, build_values_page
from hack.docs.sizing import fill_in
from kvoffload_cli.__main__ import app

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMANDS = (["plan"], ["doctor"], ["status"], ["top"], ["report"], ["explain"], ["explain", "pod"])


def build_cli_page() -> str:
    """The plugin's own help texts."""
    parts = [
        HEADER,
        "# kubectl plugin",
        "Install it from a clone: `pipx install '.[cli]'`, or pip in a virtual environment. kubectl finds "
        "`kubectl-kvoffload` on the PATH as `kubectl kvoffload`.",
        "Completion, in the shell or its start-up file (zsh, fish and powershell as well); kubectl then asks "
        "`kubectl_complete-kvoffload`, which stands beside the plugin, for commands, options, models, pools and "
        "labelled pods:",
        "```sh\nsource <(kubectl completion bash)\n```",
        "Exit status: 0 all is well, 1 `doctor` found an error, `status` or `report` could not read everything, 2 the "
        "command could not do its work.",
    ]
    for command in COMMANDS:
        result = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"})
        usage = "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())
        usage = usage.replace("Usage: root", "Usage: kubectl kvoffload")
        parts += [f"## {' '.join(command)}", f"```text\n{usage}\n```"]
    return "\n\n".join(parts) + "\n"


def build_sizing_page() -> str:
    """The page with its figures as they are now."""
    return fill_in((DOCS / "sizing.md").read_text())


def build_examples_page() -> str:
    """The page with every example as it is now."""
    return excerpts.fill_in((DOCS / "examples.md").read_text())


def build_usage_page() -> str:
    """The page with its example as it is now."""
    return excerpts.fill_in((DOCS / "use-a-pool.md").read_text())


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": build_api_page,
    "reference/metrics.md": build_page,
    "reference/settings.md": build_settings_page,
    "reference/values.md": build_values_page,
    "reference/cli.md": build_cli_page,
    "sizing.md": build_sizing_page,
    "examples.md": build_examples_page,
    "use-a-pool.md": build_usage_page,
    "../charts/kvoffload/README.md": build_chart_readme,
}


def main(arguments: list[str] | None = None) -> int:
    """Write or compare; 1 where a page differs."""
    parser = argparse.ArgumentParser(prog="python -m hack.docs.reference", description=__doc__)
    parser.add_argument("pages", nargs="*", help="only these, such as sizing.md")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    stale = []
    for name in options.pages or PAGES:
        path, text = DOCS / name, PAGES[name]()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name in stale:
        sys.stdout.write(f"docs/{name} {'differs from the code; run make docs' if options.check else 'written'}\n")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
