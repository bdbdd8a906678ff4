"""The policy that keeps installed services from starting goes when they are installed, and the machine's own stays."""

import os
from pathlib import Path

import pytest

from hack.cluster import packages


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, None), (packages.NO_SERVICES, None), ("#!/bin/sh\nexit 101\n", "#!/bin/sh\nexit 101\n")],
    ids=["none", "left by a killed run", "the machine's own"],
)
def test_the_policy_is_as_before_and_what_a_killed_run_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, after: str | None
) -> None:
    policy, missing = tmp_path / "policy-rc.d", iter([["runc"], []])
    if before is not None:
        policy.write_text(before)

    def install(*_: object, **__: object) -> None:
        assert policy.read_text() == (before or packages.NO_SERVICES), "no service starts meanwhile"

    monkeypatch.setattr(packages, "POLICY", policy)
    monkeypatch.setattr(packages, "find_missing_packages", lambda _: next(missing))
    monkeypatch.setattr(packages, "run", install)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    packages.ensure_packages(tmp_path / "log")
    assert (policy.read_text() if policy.exists() else None) == after
