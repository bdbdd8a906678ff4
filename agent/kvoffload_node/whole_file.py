"""Files of the state folder that are written whole or not at all: to a new name, then renamed.

Runs in the node daemon; used for the catalog, the last spec, attachments and the order of uses.
"""

import contextlib
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace the file, or leave it as it was and nothing beside it. Raises OSError."""
    new = path.with_name(path.name + ".new")
    try:
        new.write_bytes(content)
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
