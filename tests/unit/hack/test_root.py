"""Without root the developer's commands say so first, and begin nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hack.images.__main__ as images
from hack.cluster import lifecycle, packages
from hack.cluster.settings import ClusterSettings
from hack.console import StepError

REPOSITORY = Path(__file__).parents[3]
NOBODY = 65534


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    return tmp_path / "log"


def begin_something(*_, **__):
    raise AssertionError


def test_missing_packages_are_named_and_apt_is_not_called(log, monkeypatch):
    monkeypatch.setattr(packages, "find_missing_packages", lambda _: ["runc", "buildah"])
    monkeypatch.setattr(packages, "run", begin_something)
    with pytest.raises(StepError, match=r"missing \(runc, buildah\); run this as root, or with sudo"):
        packages.ensure_packages(log)
    assert not log.exists()


@pytest.mark.parametrize("command", [lifecycle.up, lifecycle.down])
def test_the_cluster_begins_nothing(log, tmp_path, command, monkeypatch):
    monkeypatch.setattr(lifecycle, "_locked", begin_something)
    settings = ClusterSettings(name="test", run_parent=tmp_path / "run", state_parent=tmp_path / "state")
    with pytest.raises(StepError, match=r"the local cluster needs root.*run this as root, or with sudo"):
        command(settings)
    assert not list(tmp_path.iterdir())


def test_the_images_command_begins_nothing(log, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hack.images"])
    for name in ("ensure_packages", "build_images"):
        monkeypatch.setattr(images, name, begin_something)
    with pytest.raises(StepError, match=r"building images needs root.*run this as root, or with sudo"):
        images.main()


def test_make_says_it_before_it_calls_apt(tmp_path):
    """On a machine whose Python has no venv, where `make` would install it."""
    fake = tmp_path / "bin"
    fake.mkdir()
    for name, text in {"python3": "exit 1", "id": f"echo {NOBODY}", "apt-get": f"touch {tmp_path}/called"}.items():
        (fake / name).write_text(f"#!/bin/sh\n{text}\n")
        (fake / name).chmod(0o755)
    uv = tmp_path / "cache/uv/bin/uv"
    ended = subprocess.run(
        ["make", f"KVOFFLOAD_CACHE={tmp_path}/cache", str(uv)],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": f"{fake}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode != 0
    assert "run this as root, or with sudo" in ended.stderr
    assert not (tmp_path / "called").exists()
