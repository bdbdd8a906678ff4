"""A container registry with a password, built by the test of a private one, tests/e2e/test_private_registry.py."""

from pathlib import Path

from hack.cache import cache_root
from hack.cluster.programs import GoProgram, ensure_program

PROGRAM = GoProgram(
    name="registry",
    version="3.1.2",
    module="github.com/distribution/distribution/v3",
    packages=(),
    binaries=("registry",),
    main=Path(__file__).with_name("main.go"),
)


def ensure_registry() -> Path:
    """Build the program if the cache lacks it; returns its path."""
    ensure_program(PROGRAM, log=cache_root() / "logs" / "registry.log")
    return PROGRAM.folder / PROGRAM.binaries[0]
