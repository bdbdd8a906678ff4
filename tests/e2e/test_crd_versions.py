"""CRDs that are older or newer than the operator, on a real API server; the remedies are run as they are printed."""

import contextlib
import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from e2e.control_plane import ControlPlane, program, wait_until
from e2e.operator_pools import QUICK, condition, leftovers, pool_manifest
from e2e.operator_process import running_operator
from hack.cache import REPOSITORY
from kvoffload.api.schema import build_crds

pytestmark = pytest.mark.e2e

POOLS_CRD = "kvoffloadpools.kvoffload.io"
Schema = dict[str, Any]


def pools_crd(change: Callable[[Schema], None]) -> Schema:
    """The pools' CRD with a change to the properties of its spec."""
    crd = copy.deepcopy(next(one for one in build_crds().values() if one["metadata"]["name"] == POOLS_CRD))
    crd = json.loads(json.dumps(crd))
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    change(spec["properties"])
    return dict(crd)


def older(properties: Schema) -> None:
    del properties["numaPolicy"], properties["maxEnginesPerNode"]


def newer(properties: Schema) -> None:
    properties["tier"] = {"type": "string", "default": "Fast"}


@pytest.fixture
def install(control_plane: ControlPlane) -> Iterator[Callable[[Schema], None]]:
    """Puts a CRD in, as the leader of its version does; this version's comes back afterwards."""

    def apply(*crds: Schema) -> None:
        arguments = ["apply", "--server-side", "--force-conflicts", "--field-manager=kvoffload-operator", "-f", "-"]
        control_plane.kubectl(*arguments, stdin=yaml.safe_dump_all(json.loads(json.dumps(crds))))

    yield apply
    apply(*build_crds().values())


@contextlib.contextmanager
def stored_pool(plane: ControlPlane, name: str, **spec: Any) -> Iterator[str]:
    """A pool that no node matches; it goes while the operator runs, which takes the rest away."""
    plane.apply(pool_manifest(name, nodeSelector={"nowhere": "yes"}, **spec))
    yield name
    plane.kubectl("delete", "kvpool", name)
    wait_until(lambda: not leftovers(plane, [name]), f"everything of {name} to be gone")


def properties_of(plane: ControlPlane) -> set[str]:
    version = plane.get("crd", POOLS_CRD)["spec"]["versions"][0]
    return set(version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])


def run_printed(plane: ControlPlane, command: str) -> subprocess.CompletedProcess[str]:
    """What an administrator copies into a shell, in a clone."""
    path = f"{program('kubectl').parent}:{os.environ['PATH']}"
    environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig), "PATH": path}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def doctor_remedies(plane: ControlPlane) -> dict[str, str]:
    """What doctor says about CRDs: message to remedy."""
    command = [sys.executable, "-W", "ignore", "-m", "kvoffload_cli", "doctor", "-o", "json"]
    environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    findings = json.loads(done.stdout)["findings"]
    return {one["message"]: one["remedy"] for one in findings if one["check"] == "crd_is_missing_or_outdated"}


def test_fields_that_an_older_crd_lacks_are_named_and_the_printed_remedy_brings_them(
    control_plane: ControlPlane, install: Callable[[Schema], None]
) -> None:
    install(pools_crd(older))
    with (
        running_operator(control_plane, **QUICK, apply_crds="false"),
        stored_pool(control_plane, "old-crd") as pool,
    ):
        wait_until(
            lambda: condition(control_plane, pool, "Degraded")["reason"] == "CRDOutdated", "the operator to see it"
        )
        message = condition(control_plane, pool, "Degraded")["message"]
        assert "lacks spec fields maxEnginesPerNode, numaPolicy: their defaults are in force" in message
        ((found, remedy),) = doctor_remedies(control_plane).items()
        assert "spec.maxEnginesPerNode, spec.numaPolicy" in found
        (printed,) = re.findall("`(.*?)`", message)
        assert remedy.startswith(printed)
        done = run_printed(control_plane, printed)
        assert done.returncode == 0, done.stderr
        assert doctor_remedies(control_plane) == {}
        control_plane.kubectl("annotate", "kvpool", pool, "looked=again")  # stored anew, with its defaults
        wait_until(lambda: condition(control_plane, pool, "Degraded")["reason"] == "AsAsked", "all to be as asked")


def test_an_operator_that_was_rolled_back_leaves_a_newer_crd_and_what_is_stored_in_it(
    control_plane: ControlPlane, install: Callable[[Schema], None]
) -> None:
    install(pools_crd(newer))
    with running_operator(control_plane, **QUICK) as operator, stored_pool(control_plane, "tiers", tier="Slow") as pool:
        wait_until(lambda: condition(control_plane, pool, "Degraded")["reason"] == "CRDNewer", "the operator to say so")
        assert "ignores spec fields tier" in condition(control_plane, pool, "Degraded")["message"]
        assert f"CRD {POOLS_CRD} stays as it is, it has fields of a newer version: ['spec.tier']" in (
            operator.log.read_text()
        )
        assert "tier" in properties_of(control_plane)
        assert control_plane.get("kvpool", pool)["spec"]["tier"] == "Slow"


def test_a_leader_brings_an_older_crd_to_its_version(
    control_plane: ControlPlane, install: Callable[[Schema], None]
) -> None:
    install(pools_crd(older))
    with running_operator(control_plane, **QUICK):
        wait_until(lambda: "numaPolicy" in properties_of(control_plane), "the CRD of this version")
