"""Writes files of the repository into pages that show them, so that a page reads the same everywhere.

Called by `reference.py`. `<!-- file: PATH -->` to `<!-- /file -->` becomes the file, fenced as its suffix says.
"""

import re
from pathlib import Path

from hack.cache import REPOSITORY


def fill_in(text: str) -> str:
    """The page with every marked part replaced by the file as it is now. Raises OSError where there is none."""
    return re.sub(
        r"<!-- file: (\S+) -->\n.*?<!-- /file -->",
        lambda match: f"<!-- file: {match[1]} -->\n{_fenced(REPOSITORY / match[1])}<!-- /file -->",
        text,
        flags=re.DOTALL,
    )


def _fenced(path: Path) -> str:
    return f"```{path.suffix.removeprefix('.')}\n{path.read_text().rstrip()}\n```\n"
