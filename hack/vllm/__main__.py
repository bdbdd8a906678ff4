"""Prepare vLLM by hand: `python -m hack.vllm environment [VERSION] [--gpu]` or `... model NAME`; prints the folder."""

import argparse

from hack.console import main_guard, say
from hack.vllm.environment import DEFAULT_VERSION, ensure_vllm_environment
from hack.vllm.models import ensure_model


def main() -> None:
    """Make what was asked for and print where it is."""
    parser = argparse.ArgumentParser(prog="python -m hack.vllm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    environment = commands.add_parser("environment")
    environment.add_argument("version", nargs="?", default=DEFAULT_VERSION)
    environment.add_argument("--gpu", action="store_true", help="the CUDA build")
    model = commands.add_parser("model")
    model.add_argument("name")
    options = parser.parse_args()
    if options.command == "environment":
        say(str(ensure_vllm_environment(options.version, gpu=options.gpu)))
    else:
        say(str(ensure_model(options.name)))


if __name__ == "__main__":
    main_guard(main)
