"""The commands that the documentation tells people to type, as a shell would split them; for tests.

Read from the fenced blocks of a shell, and from what stands between backquotes and begins with one of `PROGRAMS`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hack.cache import REPOSITORY

PROGRAMS = ("kubectl", "helm", "make", "python", ".venv/bin/python")
BETWEEN_COMMANDS = frozenset(";&|()")
REDIRECTION = re.compile(r"^\d?[<>]")


@dataclass(frozen=True, slots=True)
class PrintedCommand:
    """One command, the line where it (or its block) begins, and its words, of which the first is the program."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


@cache
def documentation_pages() -> tuple[Path, ...]:
    """Every page in Markdown that the repository keeps, but CHANGELOG.md, which speaks of what was."""
    folders = [path for path in REPOSITORY.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "build"]
    below = (path for folder in folders for path in folder.rglob("*.md"))
    return tuple(sorted([*below, *(path for path in REPOSITORY.glob("*.md") if path.name != "CHANGELOG.md")]))


@cache
def printed_commands() -> tuple[PrintedCommand, ...]:
    """Every command of every page whose program is one of `PROGRAMS`."""
    return tuple(
        PrintedCommand(str(page.relative_to(REPOSITORY)), line, words)
        for page in documentation_pages()
        for line, text in _shell_texts(page.read_text())
        for words in split_commands(text)
    )


def commands_of(program: str) -> list[PrintedCommand]:
    """Those of one program; of kubectl without those of our plugin, which is the program `kubectl kvoffload`."""
    words = tuple(program.split())
    found = [command for command in printed_commands() if command.words[: len(words)] == words]
    return [command for command in found if program != "kubectl" or command.words[1:2] != ("kvoffload",)]


def _shell_texts(text: str) -> Iterator[tuple[int, str]]:
    """Blocks of a shell, commands in blocks that show their output, and single code spans, each with its line."""
    language: str | None = None
    block: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"^\s*```(\w*)$", line)
        if fence and language is None:
            language, block = fence[1], []
        elif fence:
            if language in ("", "sh"):
                yield number - len(block), "\n".join(block)
            elif language == "text":
                yield from ((number, one.removeprefix("$ ")) for one in block if one.startswith("$ "))
            language = None
        elif language is not None:
            block.append(line)
        else:
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line) if span.startswith(PROGRAMS))


def split_commands(text: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of a shell's text that run one of `PROGRAMS`, without comments and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        for inner in re.findall(r"\$\(([^()]*)\)", line):
            yield from split_commands(inner)
        lexer = shlex.shlex(re.sub(r"\$\([^()]*\)", "SUBSTITUTED", line), posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        try:
            words = list(lexer)
        except ValueError:
            continue  # an apostrophe in a picture or in a comment of another language: no command of ours has one
        command: list[str] = []
        for word in [*words, ";"]:
            if set(word) <= BETWEEN_COMMANDS:
                if command and command[0] in PROGRAMS:
                    yield tuple(one for one in command if not REDIRECTION.match(one))
                command = []
            elif command or not re.match(r"^\w+=", word):  # a variable may be set before the program
                command.append(word)
