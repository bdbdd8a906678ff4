"""Where what is slow to make is kept between runs, and the names under which it is found again.

`$KVOFFLOAD_CACHE`, by default `~/.cache/kvoffload`. Every entry's name holds the versions or the content hash that it
was made from, so an entry is never stale: it is there and whole, or it is made.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD = REPOSITORY / "build"


def cache_root() -> Path:
    """Return the cache folder; it need not exist yet."""
    return Path(os.environ.get("KVOFFLOAD_CACHE") or Path.home() / ".cache" / "kvoffload").expanduser().resolve()


def content_hash(paths: Iterable[Path], *facts: str) -> str:
    """Return 12 hex digits that change with the bytes or the names of the files (folders: all below) or the facts."""
    digest = hashlib.sha256("\0".join(facts).encode())
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(path.parent)}\0{file.stat().st_mode & 0o111}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


@contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """Give a sibling folder to fill, and rename it to `target` only when the block ended without an error."""
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.rename(target)
