"""The local cluster's command: `python -m hack.cluster up|down|status|load ARCHIVE|env|build`.

A real single-node Kubernetes on this machine, in a network namespace of its own, built from Go modules. Called by the
Makefile, the demo and the end-to-end tests.
"""

import argparse
import sys
from pathlib import Path

from hack.cluster import lifecycle, processes
from hack.cluster.packages import ensure_packages
from hack.cluster.programs import ensure_programs
from hack.cluster.settings import ClusterSettings
from hack.console import main_guard, say


def main() -> None:
    """Carry out the command of the command line."""
    parser = argparse.ArgumentParser(prog="python -m hack.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="start what is not running; builds its programs the first time")
    commands.add_parser("down", help="stop everything and give back pages, mounts, cgroups and the network namespace")
    commands.add_parser("status", help="say which programs run")
    commands.add_parser("build", help="only build the programs")
    commands.add_parser("env", help="print the export lines for KUBECONFIG and PATH, the plugin's folder too")
    load = commands.add_parser("load", help="import an image archive")
    load.add_argument("archive", type=Path)
    options = parser.parse_args()
    settings = ClusterSettings.from_environment()
    match options.command:
        case "up":
            lifecycle.up(settings)
        case "down":
            lifecycle.down(settings)
        case "status":
            for name in (*lifecycle.CONTROL_PLANE, *lifecycle.NODE):
                say(f"{name:20} {processes.find_running(name, settings) or 'not running'}")
            say(f"{'node Ready':20} {lifecycle.is_ready(settings)}")
        case "build":
            ensure_packages(settings.logs / "build.log")
            ensure_programs(settings.logs / "build.log")
        case "load":
            lifecycle.load_image(options.archive, settings)
        case "env":
            say(f"export KUBECONFIG={settings.kubeconfig}")
            say(f"export PATH={settings.binaries}:{Path(sys.executable).parent}:$PATH")  # kubectl, helm; our plugin


if __name__ == "__main__":
    main_guard(main)
