"""Kinds of other projects on the local cluster, by their own CustomResourceDefinitions."""

from functools import partial

import yaml

from hack.console import wait_until
from hack.demo.kubernetes import Kubernetes
from hack.foreign_crds import find_foreign_crd


def crd_name(kind: str) -> str:
    """The name of the kind's definition, by which kubectl knows the kind as well."""
    return str(yaml.safe_load(find_foreign_crd(kind).read_text())["metadata"]["name"])


def define(kubernetes: Kubernetes, *kinds: str) -> None:
    """Make the API server serve the kinds."""
    for kind in kinds:  # on the server: KServe's is larger than the annotation that kubectl would write may be
        kubernetes.kubectl("apply", "--server-side", "-f", find_foreign_crd(kind))
    for kind in kinds:
        is_known = partial(kubernetes.is_known, crd_name(kind))
        wait_until(f"the API server to serve {kind}", is_known, timeout_seconds=120)


def remove(kubernetes: Kubernetes, *kinds: str) -> None:
    """Take the kinds away, and all objects of them."""
    kubernetes.kubectl("delete", "crd", "--ignore-not-found", *map(crd_name, kinds))
