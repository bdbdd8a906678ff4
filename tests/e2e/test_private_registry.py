"""A registry that asks for a password: docs/install.md's commands as they are printed, and real pulls by digest.

The registry listens on the loopback of the node's namespace, under a name that only this test's files resolve: a hosts
file for who pushes, containerd's own `hosts.toml` for who pulls.
"""

import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.own_release import OwnRelease, own_release
from e2e.user_tools import run_plugin
from hack.cache import REPOSITORY
from hack.cluster import lifecycle
from hack.cluster.programs import ensure_program
from hack.console import wait_until
from hack.demo.installation import NAMESPACE, RELEASE
from hack.demo.run import Stage
from hack.images.build import NODE, OPERATOR
from hack.images.storage import run_buildah, storage_root
from hack.registry.program import PROGRAM
from hack.shell import run

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.runs_first, pytest.mark.long]

HOST = "registry.kvoffload.test"
ADDRESS = "127.0.0.1:5000"
REGISTRY = f"{HOST}:5000"
USER, PASSWORD = "puller", "a password"
TAG = "private"
PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff")
HOSTS_TOML = f"""\
server = "http://{ADDRESS}"
[host."http://{ADDRESS}"]
capabilities = ["pull", "resolve"]
"""
LOCATION = f"""\
[[registry]]
location = "{REGISTRY}"
insecure = true
"""


@dataclass(frozen=True, slots=True)
class Private:
    """The registry, and the release that is to come from it."""

    release: OwnRelease
    folder: Path

    def run_as_printed(self, commands: str) -> None:
        """Run commands of the documentation in the node's namespace, where the registry's name is known."""
        settings = self.release.kubernetes.settings
        placeholders = {
            r"\bREGISTRY\b": REGISTRY,
            r"\bUSER\b": USER,
            r"\bTAG\b": TAG,
            re.escape("~/.cache/kvoffload/containers"): str(storage_root()),
        }
        for placeholder, value in placeholders.items():
            commands = re.sub(placeholder, value, commands)
        mounts = "mount --bind hosts /etc/hosts; mount --bind registries.conf /etc/containers/registries.conf\n"
        run(
            ["nsenter", f"--net={settings.namespace_path}", "unshare", "--mount", "bash", "-euc", mounts + commands],
            cwd=self.folder,
            stdin=f"{PASSWORD}\n",
            environment={
                "KUBECONFIG": str(settings.kubeconfig),
                "PATH": f"{settings.binaries}:{os.environ['PATH']}",
                "REGISTRY_AUTH_FILE": str(self.folder / "auth.json"),
            },
        )

    def digest(self, image: str) -> str:
        """What `buildah push` wrote of `operator` or `node`."""
        return (self.folder / f"{image}.digest").read_text()

    def answers(self) -> list[tuple[str, str, int]]:
        """What the node's runtime asked the registry for: method, path, status of the answer."""
        log = (self.folder / "log").read_text()
        found = re.findall(r'"(GET|HEAD) /v2/([^?\s]+)\S* HTTP/1.1" (\d+) \d+ "[^"]*" "containerd/', log)
        return [(method, path, int(status)) for method, path, status in found]


def build_unseen_images(stage: Stage, folder: Path) -> list[str]:
    """Our images with one more layer, which the node can have from the registry only; returns their names."""
    (folder / "unseen").write_text(secrets.token_hex(16))
    names = []
    for product in (OPERATOR, NODE):
        container = run_buildah("from", "--pull=never", f"{product.repository}:{stage.images.tag}").strip()
        run_buildah("copy", "--quiet", container, folder / "unseen", "/unseen")
        names.append(f"{product.repository}:{TAG}")
        run_buildah("commit", "--quiet", "--rm", container, names[-1])
    return names


def printed_commands() -> tuple[str, str]:
    """The section's code block: what pushes, and what makes the Secret and installs."""
    section = (REPOSITORY / "docs" / "install.md").read_text().partition("### A private registry\n")[2]
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section.partition("\n## ")[0], re.DOTALL | re.MULTILINE)
    push, secret, install = re.split(r"^(?=kubectl create secret|helm upgrade)", block, flags=re.MULTILINE)
    return push, secret + install


@pytest.fixture
def private(stage: Stage, tmp_path: Path) -> Iterator[Private]:
    settings = stage.kubernetes.settings
    (tmp_path / "store").mkdir()
    (tmp_path / "charts").symlink_to(REPOSITORY / "charts")
    (tmp_path / "hosts").write_text(f"{ADDRESS.partition(':')[0]} localhost {HOST}\n")
    (tmp_path / "registries.conf").write_text(LOCATION)
    images = build_unseen_images(stage, tmp_path)
    with (tmp_path / "log").open("wb") as log:
        # a test that is killed leaves no registry behind
        program = ["setpriv", "--pdeathsig", "KILL", ensure_program(PROGRAM), ADDRESS, tmp_path / "store"]
        environment = os.environ | {"REGISTRY_USER": USER, "REGISTRY_PASSWORD": PASSWORD}
        command = ["nsenter", f"--net={settings.namespace_path}", *map(str, program)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    reached_by = settings.registries / REGISTRY / "hosts.toml"
    try:
        reached_by.parent.mkdir(parents=True, exist_ok=True)
        reached_by.write_text(HOSTS_TOML)
        wait_until("the registry", lambda: "listening on" in (tmp_path / "log").read_text(), timeout_seconds=60)
        with own_release(stage, RELEASE) as release:
            yield Private(release, tmp_path)
    finally:
        process.terminate()
        process.wait(20)
        reached_by.unlink(missing_ok=True)
        reached_by.parent.rmdir()
        run_buildah("rmi", "--force", *images)
        held = [image for image in lifecycle.list_images(settings) if image.startswith(REGISTRY)]
        if held:
            run(lifecycle.ctr(settings, "images", "rm", "--sync", *held))


def containers(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [status for pod in pods for status in pod["status"].get("containerStatuses", [])]


def wait_not_pulled(private: Private, component: str) -> None:
    """Wait until the kubelet has given up on an image of every container for the first time."""

    def waits() -> list[str]:
        states = [one["state"].get("waiting", {}) for one in containers(private.release.pods(component))]
        return [state.get("reason", "") for state in states]

    wait_until(
        f"{component} to say that its image is not pulled",
        lambda: "ImagePullBackOff" in waits() and set(waits()) <= set(PULL_FAILURES),
        timeout_seconds=60,
        explain=lambda: str(waits()),
    )


def find(private: Private, check: str) -> list[dict[str, str]]:
    """Findings of `kubectl kvoffload doctor` by that check."""
    document = run_plugin(private.release.kubernetes, "doctor", "-o", "json").document
    return [one for one in document["findings"] if one["check"] == check]


def assert_names_the_pull(finding: dict[str, str]) -> None:
    """What waits for its image, and what to do."""
    assert any(reason in finding["message"] for reason in PULL_FAILURES)
    assert "imagePullSecrets" in finding["remedy"]


def test_images_are_pulled_by_digest_with_the_secret_and_doctor_says_where_they_are_not(private: Private) -> None:
    release, kubernetes = private.release, private.release.kubernetes
    push, install = printed_commands()
    for_this_cluster = f" --set kubeletRootDir={kubernetes.settings.kubelet_root} --timeout=120s"
    private.run_as_printed(push)
    kubernetes.ensure_namespace(NAMESPACE)

    without_secret = re.sub(r"^kubectl create secret.*?(?=^helm)", "", install, flags=re.DOTALL | re.MULTILINE)
    private.run_as_printed(without_secret.strip().replace(" --wait", "") + for_this_cluster)
    for component in ("operator", "webhook"):
        wait_not_pulled(private, component)
    found = find(private, "release_is_incomplete")
    assert {one["subject"].rpartition("/")[2] for one in found} == {
        "kvoffload-operator", "kvoffload-webhook-0", "kvoffload-webhook-1"
    }  # fmt: skip
    for one in found:
        assert_names_the_pull(one)
    kubernetes.helm("uninstall", RELEASE, f"--namespace={NAMESPACE}", "--wait")
    assert {status for _, path, status in private.answers() if "manifests" in path} == {401}

    private.run_as_printed("read -rs PASSWORD\n" + install.strip() + for_this_cluster)
    release.make_pool()
    for component, image in (("operator", "operator"), ("webhook", "operator"), ("node", "node")):
        wanted = f"{REGISTRY}/kvoffload/{image}@{private.digest(image)}"
        assert {one["imageID"] for one in containers(release.pods(component))} == {wanted}
        assert ("GET", f"kvoffload/{image}/manifests/{private.digest(image)}", 200) in private.answers()
        assert [path for _, path, status in private.answers() if f"{image}/blobs" in path and status == 200]
    assert find(private, "daemon_does_not_run") == []

    kubernetes.delete("secret", "registry", namespace=NAMESPACE)
    kubernetes.delete("pod", release.daemon()["metadata"]["name"], namespace=NAMESPACE)
    wait_not_pulled(private, "node")
    (failing,) = find(private, "daemon_does_not_run")
    assert_names_the_pull(failing)
