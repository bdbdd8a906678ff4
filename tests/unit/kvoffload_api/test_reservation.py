"""The shell lines that reserve pages, run by a shell on files that stand for the kernel's."""

import subprocess
from pathlib import Path

import pytest

from kvoffload.api.pool import PageSize
from kvoffload.api.reservation import MEMINFO, SYSCTL_FILE, pages_file, raise_beside_others, raise_to, reserve_remedy


def run(command: str, folder: Path, *, total: int, free: int, default_kib: int = 2048) -> str:
    """Run it with the kernel's files in `folder`; what it would set, or prints."""
    (folder / "nr_hugepages").write_text(f"{total}\n")
    (folder / "free_hugepages").write_text(f"{free}\n")
    (folder / "sysctl").write_text('#!/bin/sh\ncat "$2"\n')
    (folder / "sysctl").chmod(0o755)
    for size in PageSize:
        command = command.replace(str(Path(pages_file(size)).parent), str(folder))
    (folder / "meminfo").write_text(f"Hugetlb: 0 kB\nHugepagesize:    {default_kib:7} kB\n")
    command = command.replace(MEMINFO, str(folder / "meminfo"))
    command = command.replace(SYSCTL_FILE, str(folder / "written.conf"))
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, check=False
    ).stdout.strip()


@pytest.mark.parametrize(("present", "wanted", "expected"), [(0, 384, 384), (320, 384, 384), (512, 384, 512)])
def test_the_number_is_raised_and_never_lowered(tmp_path: Path, present: int, wanted: int, expected: int) -> None:
    line = raise_to(PageSize.MI_2, wanted)
    assert run(line, tmp_path, total=present, free=present) == f"vm.nr_hugepages={expected}"
    line = raise_to(PageSize.GI_1, wanted)
    assert run(line, tmp_path, total=present, free=present) == f"hugepagesz=1G hugepages={expected}"


@pytest.mark.parametrize(("present", "free", "expected"), [(0, 0, 100), (512, 512, 512), (512, 12, 600)])
def test_pages_in_use_are_added_to_and_free_ones_are_taken(
    tmp_path: Path, present: int, free: int, expected: int
) -> None:
    line = raise_beside_others(PageSize.MI_2, 100)
    assert run(line, tmp_path, total=present, free=free) == f"vm.nr_hugepages={expected}"
    assert run(line, tmp_path, total=expected, free=expected - (present - free)) == f"vm.nr_hugepages={expected}"


def test_nothing_is_set_where_sysctl_would_count_pages_of_another_size(tmp_path: Path) -> None:
    assert run(raise_to(PageSize.MI_2, 384), tmp_path, total=0, free=0, default_kib=1 << 20) == ""
    assert not (tmp_path / "written.conf").exists()


@pytest.mark.parametrize("size", PageSize)
def test_the_remedy_ends_with_the_kubelet_that_must_count_again(size: PageSize) -> None:
    assert "systemctl restart kubelet" in reserve_remedy(size, 384)
    assert "where it has 384 already" in reserve_remedy(size, 384)
