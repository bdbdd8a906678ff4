"""`python -m bench [daemon] [engine] [webhook]`: run every row, or those of one part, print the table, write
build/bench/results.json and the tables of docs/reference/speed-*.md."""

import json
import os
import platform
import sys
from datetime import UTC, datetime

from bench import daemon, engine, webhook
from hack.docs.speed_pages import RESULTS, table, write_pages

PARTS = {"daemon": daemon.run, "engine": engine.run, "webhook": webhook.run}


def main() -> int:
    """Run and report; the exit status does not depend on targets, which the table and the file tell of."""
    measured = (
        f"on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load before {os.getloadavg()[0]:.1f}"
    )
    rows = [
        {"part": name, "measured": measured, **row.to_json()} for name in sys.argv[1:] or PARTS for row in PARTS[name]()
    ]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"\nMeasured {measured}:\n\n{table(rows)}")
    for path in (RESULTS, *write_pages(rows)):
        print(f"written to {path}")
    return 0


sys.exit(main())
