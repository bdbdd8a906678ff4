"""Commands of the node image: `python -m kvoffload_node daemon` and `python -m kvoffload_node attacher`."""

import argparse
import asyncio
import json
import logging
import sys

from kvoffload.api.region import KVOffloadRegionSpec
from kvoffload.errors import KVOffloadError
from kvoffload_node.daemon import Daemon
from kvoffload_node.settings import NodeSettings


def main() -> int:
    """Run one of the two processes until it is told to stop."""
    parser = argparse.ArgumentParser(prog="kvoffload_node", description=__doc__)
    parser.add_argument("command", choices=["daemon", "attacher"])
    command = parser.parse_args().command
    settings = NodeSettings()  # type: ignore[call-arg]  # its fields come from the environment
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(_run_daemon(settings) if command == "daemon" else _run_attacher(settings))
    except KVOffloadError as error:
        logging.getLogger("kvoffload_node").error("%s", error)
        return 1
    return 0


async def _run_daemon(settings: NodeSettings) -> None:
    assert settings.region_file is not None
    spec = KVOffloadRegionSpec.model_validate(json.loads(settings.region_file.read_text()))
    await Daemon(settings, spec).run()


async def _run_attacher(settings: NodeSettings) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main())
