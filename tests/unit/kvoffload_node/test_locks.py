"""Attachments tell who lives, and what is half written leaves nothing: no file, no descriptor."""

import os
from pathlib import Path

import pytest

from kvoffload_node.session.locks import AttachmentEntry, Attachments


def entry(number: int) -> AttachmentEntry:
    return AttachmentEntry(
        number=number,
        engine=1,
        pod_uid="uid",
        pod_namespace="ns",
        pod_name="pod",
        predicted_layout="auto",
        tenant="pool",
        engine_id="e",
        identity=b"i" * 32,
        world_size=1,
        rank=0,
        process=b"",
    )


def descriptors() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


def test_an_attachment_that_cannot_be_written_leaves_no_file_and_no_descriptor(tmp_path: Path) -> None:
    attachments = Attachments(tmp_path / "attachments")
    (tmp_path / "attachments/7.json").mkdir()
    before = descriptors()
    with pytest.raises(OSError, match="Is a directory"):
        attachments.create(entry(7))
    assert descriptors() == before
    assert [path.name for path in attachments.folder.iterdir()] == ["7.json"]
    (tmp_path / "attachments/7.json").rmdir()
    os.close(attachments.create(entry(7)))
    assert [found.number for found in attachments.read_all()] == [7]


def test_what_a_kill_in_the_middle_left_is_removed_and_the_lock_of_who_lives_is_not(tmp_path: Path) -> None:
    attachments = Attachments(tmp_path / "attachments")
    living, dead = attachments.create(entry(11)), attachments.create(entry(2))
    os.close(dead)
    (attachments.folder / "5.lock").touch()
    (attachments.folder / "6.lock").touch()
    (attachments.folder / "6.json.new").touch()
    again = Attachments(attachments.folder)
    assert [found.number for found in again.read_all()] == [2, 11], "the oldest first"
    assert (again.is_held(11), again.is_held(2), again.is_held(5)) == (True, False, False)
    again.remove(2)
    assert {path.name for path in again.folder.iterdir()} == {"11.lock", "11.json"}
    os.close(living)
    assert not again.is_held(11)
