"""cert-manager as one process, built by the long test of the chart's mode cert-manager, tests/e2e/test_cert_manager.py.

Upstream's programs are Go modules of their own (cmd/controller, cmd/cainjector), which only its repository serves;
main.go runs the same controllers and CA injector from the packages of its main module. The build takes 2 to 6 min.
"""

from pathlib import Path

from hack.cluster.programs import GoProgram, download_module
from hack.foreign_crds import CERT_MANAGER

PROGRAM = GoProgram(
    name="cert-manager",
    version=CERT_MANAGER[1],
    module=CERT_MANAGER[0],
    packages=(),
    binaries=("cert-manager",),
    main=Path(__file__).with_name("main.go"),
)


def cert_manager_crds() -> list[Path]:
    """Its CustomResourceDefinitions, one file each."""
    return sorted((download_module(*CERT_MANAGER) / "deploy" / "crds").glob("*.yaml"))
