"""`python -m bench [daemon] [engine] [webhook]`: run every row, or those of one part, print the table, write
build/bench/results.json."""

import json
import os
import platform
import sys
from pathlib import Path

from bench import daemon, engine, webhook
from bench.rows import Row

RESULTS = Path("build/bench/results.json")
PARTS = {"daemon": daemon.run, "engine": engine.run, "webhook": webhook.run}


def main() -> int:
    """Run and report; the exit status does not depend on targets, which the table and the file tell of."""
    load_before = os.getloadavg()[0]
    rows = [row for name in sys.argv[1:] or PARTS for row in PARTS[name]()]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps([row.to_json() for row in rows], indent=2) + "\n")
    print(f"\n{os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}")
    print(f"load before: {load_before:.1f}\n")
    print_table(rows)
    print(f"\nwritten to {RESULTS}")
    return 0


def print_table(rows: list[Row]) -> None:
    """As Markdown, so that it can stand in the documentation."""
    print("| what | unit | ours (p10 to p90) | reference | ratio | target | met |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        ours = f"{row.ours.median:.3g} ({row.ours.low:.3g} to {row.ours.high:.3g})"
        reference = f"{row.reference.median:.3g} ({row.reference_name})" if row.reference else "not here"
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        met = "yes" if row.met else "no"
        print(f"| {row.name} | {row.unit} | {ours} | {reference} | {ratio} | {row.target} | {met} |")


sys.exit(main())
