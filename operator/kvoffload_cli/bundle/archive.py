"""One zip file, mode 0600, that is there whole or not at all. Called by `report`."""

import contextlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from kvoffload.errors import InvalidSpec

MODE = 0o600


@contextlib.contextmanager
def writing_whole(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file that takes the target's place at the end, and is gone if there is no such end.

    Raises:
        InvalidSpec: the target is there and may not be overwritten, or its folder takes no file.
    """
    if target.is_dir():
        raise InvalidSpec(f"{target} is a folder; give the name of a file in it")
    if target.exists() and not force:
        raise InvalidSpec(f"{target} is there already; give another --file, or --force to overwrite it")
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")  # mode 0600
    except OSError as error:
        raise InvalidSpec(f"cannot write into {target.parent}: {error.strerror}") from error
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        _publish(temporary, target, force=force)
    except OSError as error:
        raise InvalidSpec(f"cannot write {target}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _publish(temporary: Path, target: Path, *, force: bool) -> None:
    if force:
        temporary.replace(target)
        return
    try:
        os.link(temporary, target)  # unlike a rename, it does not replace what came meanwhile
    except OSError:
        if target.exists():
            raise
        temporary.replace(target)  # a file system without hard links


def write_zip(stream: BinaryIO, entries: Iterable[tuple[str, Any]], *, folder: str, now: datetime) -> dict[str, int]:
    """Write texts as they are and documents as JSON, all in one folder; returns the bytes of each."""
    sizes = {}
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            text = content if isinstance(content, str) else json.dumps(content, indent=1, default=str) + "\n"
            one = zipfile.ZipInfo(f"{folder}/{name}", date_time=now.timetuple()[:6])
            one.external_attr, one.compress_type = MODE << 16, zipfile.ZIP_DEFLATED
            encoded = text.encode()
            archive.writestr(one, encoded)
            sizes[name] = len(encoded)
    return sizes
