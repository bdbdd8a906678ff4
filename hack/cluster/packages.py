"""Debian packages that the cluster and the images need: installed when missing, their services kept from starting."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from hack.console import StepError, require_root, say, step
from hack.shell import run

# program or file that shows that the package is there -> package
PACKAGES = {
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "prometheus": "prometheus",
    "nft": "nftables",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "conntrack": "conntrack",
}
POLICY = Path("/usr/sbin/policy-rc.d")
NO_SERVICES = "#!/bin/sh\n# of kvoffload's hack/cluster, while it installs packages\nexit 101\n"
"""Known again where a killed run has left it."""


PROMTOOL = {"promtool": "prometheus"}
"""What the tests of the alert rules need, where the cluster's packages are not installed yet."""
CHROMIUM = {"chromium": "chromium"}
"""What photographs the dashboard."""


def find_missing_packages(packages: Mapping[str, str]) -> list[str]:
    """Return the packages whose program is not on this machine."""
    return [package for shown_by, package in packages.items() if not shutil.which(shown_by)]


def ensure_packages(log: Path, packages: Mapping[str, str] = PACKAGES) -> None:
    """Install what is missing. Debian's prometheus would start a server: policy-rc.d forbids that meanwhile."""
    missing = find_missing_packages(packages)
    if not missing:
        return
    require_root(f"Debian packages are missing ({', '.join(missing)})")
    if not shutil.which("apt-get"):
        raise StepError(f"these programs are missing and there is no apt-get to install them: {', '.join(missing)}")
    has_own_policy = POLICY.exists() and POLICY.read_text() != NO_SERVICES
    with step(f"Installing Debian packages: {' '.join(missing)} (log: {log})"):
        if not has_own_policy:
            POLICY.write_text(NO_SERVICES)
            POLICY.chmod(0o755)
        try:
            environment = {"DEBIAN_FRONTEND": "noninteractive"}
            run(["apt-get", "update"], log=log, environment=environment)
            run(["apt-get", "install", "-y", "--no-install-recommends", *missing], log=log, environment=environment)
        finally:
            if not has_own_policy:
                POLICY.unlink()
    still_missing = find_missing_packages(packages)
    if still_missing:
        raise StepError(
            f"apt-get installed {' '.join(missing)} but the programs of {still_missing} are absent", log=log
        )
    say("    (services of these packages were not started)")
