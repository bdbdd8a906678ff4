"""A container registry with a password, built by the test of a private one, tests/e2e/test_private_registry.py."""

from pathlib import Path

from hack.cluster.programs import GoProgram

PROGRAM = GoProgram(
    name="registry",
    version="3.1.2",
    module="github.com/distribution/distribution/v3",
    packages=(),
    binaries=("registry",),
    main=Path(__file__).with_name("main.go"),
)
