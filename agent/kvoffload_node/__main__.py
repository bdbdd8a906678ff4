"""Commands of the node image: `python -m kvoffload_node daemon` and `python -m kvoffload_node attacher`."""

import os
import signal

if __name__ == "__main__":
    # A container's first process gets only the signals that it handles, and what is imported below takes a second: one
    # that is told to stop meanwhile would not hear it, and hold its pod up until the kubelet kills it.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))

import argparse
import asyncio
import logging
import resource
import sys
import time

from kvoffload.errors import KVOffloadError
from kvoffload_node.settings import NodeSettings

ALIVE_SECONDS = 30.0
"""An attacher that has not looked around for so long is stuck."""


def main() -> int:
    """Run one of the two processes until it is told to stop."""
    parser = argparse.ArgumentParser(prog="kvoffload_node", description=__doc__)
    parser.add_argument("command", choices=["daemon", "attacher"])
    command = parser.parse_args().command
    settings = NodeSettings()  # type: ignore[call-arg]  # its fields come from the environment
    # Many container runtimes start with a soft limit of 1,024, fewer than 64 engines of eight ranks and pods need.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        if command == "daemon":
            from kvoffload_node.daemon import Daemon  # each process loads only what it runs

            asyncio.run(Daemon(settings).run())
        else:
            _run_attacher(settings)
    except KVOffloadError as error:
        logging.getLogger("kvoffload_node").error("%s", error)
        return 1
    return 0


def _run_attacher(settings: NodeSettings) -> None:
    from kvoffload_node.attach.attacher import Attacher
    from kvoffload_node.attach.handoff import Handoff
    from kvoffload_node.attach.pods import NodePods
    from kvoffload_node.health import TEXT, Answer, Endpoints

    pods = NodePods(pool=settings.pool, node_name=settings.node_name, own_namespace=settings.namespace)
    attacher = Attacher(
        pods=pods,
        kubelet_pods=settings.kubelet_pods,
        library=settings.engine_library,
        handoff=Handoff(settings.handoff_socket),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: attacher.stopped.set())

    def healthz() -> Answer:
        if time.monotonic() - attacher.last_look >= ALIVE_SECONDS:
            return 503, TEXT, b"the attacher has stopped looking at pods\n"
        if not pods.watching.is_alive:
            return 503, TEXT, b"the attacher hears of no pod any more\n"
        return 200, TEXT, b"ok\n"

    pods.start()
    endpoints = Endpoints(settings.attacher_port, {"/healthz": healthz})
    attacher.run()
    pods.watching.stop()
    endpoints.stop()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    # Threads that wait for a watch or serve the endpoints still run. An interpreter that is torn down beneath them may
    # abort (seen: exit status -6), which a pod would show as a crash; all that had to be done in order is done.
    os._exit(status)
