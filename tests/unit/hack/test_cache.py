"""Names in the cache change with the content, and an entry is there whole or not at all."""

import pytest

from hack.cache import content_hash, made_whole


def test_the_hash_changes_with_bytes_names_and_facts_and_with_nothing_else(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.py").write_text("1")
    first = content_hash([folder], "fact")
    assert content_hash([folder], "fact") == first
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_text("compiled")
    assert content_hash([folder], "fact") == first
    assert content_hash([folder], "other fact") != first
    (folder / "a.py").write_text("2")
    changed = content_hash([folder], "fact")
    assert changed != first
    (folder / "a.py").rename(folder / "b.py")
    assert content_hash([folder], "fact") not in (first, changed)


def test_an_interrupted_entry_is_not_there_and_is_begun_anew(tmp_path):
    target = tmp_path / "entry"

    def be_interrupted() -> None:
        with made_whole(target) as unfinished:
            (unfinished / "half").write_text("")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        be_interrupted()
    assert not target.exists()
    with made_whole(target) as unfinished:
        assert not list(unfinished.iterdir())
        (unfinished / "whole").write_text("")
    assert [path.name for path in target.iterdir()] == ["whole"]
