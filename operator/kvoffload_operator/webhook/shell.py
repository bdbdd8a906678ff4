"""Just enough of the shell to read `sh -c` scripts of manifests: words, quotes, variables, simple commands. Pure.

Called by `command_line.py`. Nothing is run and nothing is guessed: command substitutions, variables that the image may
set, here-documents and unbalanced quotes are unknown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

UNKNOWN = "\x00unknown"
"""Stands in a word for what cannot be told."""

ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_SHELL_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?::?([-+=?])([^}]*))?\}|([@*#?0-9!$-])|\()"
)
_REDIRECTION = re.compile(r"(?:<<?<?|>>?)[&|]?[ \t]*(?:'[^']*'|\"[^\"]*\"|[^\s;&|()<>'\"]+)")


def simple_commands(script: str, variables: dict[str, str | None], positional: Sequence[str]) -> Iterator[list[str]]:
    """The script's simple commands with what is known put in; a script that cannot be split has none."""
    tokens = split_script(script)
    if tokens is None:
        return
    simple: list[str] = []
    for token in [*tokens, None]:
        if token is not None:
            simple.extend(_expand_shell(token, variables, positional))
            continue
        assigned = list(_leading_assignments(simple))
        if assigned and len(assigned) == len(simple):
            variables.update(_split_assignment(word) for word in assigned)  # kept for what follows
        elif simple[:1] == ["export"]:
            variables.update(_split_assignment(word) for word in simple[1:] if ASSIGNMENT.match(word))
        else:
            yield simple
        simple = []


def _split_assignment(word: str) -> tuple[str, str | None]:
    name, _, value = word.partition("=")
    return name, None if UNKNOWN in value else value


def _leading_assignments(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if not ASSIGNMENT.match(word):
            return
        yield word


def split_script(script: str) -> list[str | None] | None:
    """Raw words with their quotes, None between simple commands; None where the script cannot be split (here-documents,
    unbalanced quotes). Redirections and comments are left out.
    """
    tokens: list[str | None] = []
    word, index = "", 0

    def end_word() -> None:
        nonlocal word
        if word:
            tokens.append(word)
            word = ""

    while index < len(script):
        char = script[index]
        if char in " \t\r":
            end_word()
        elif script.startswith("\\\n", index):
            index += 1
        elif char in ";&|()\n":
            end_word()
            tokens.append(None)
        elif char == "#" and not word:
            end = script.find("\n", index)
            index = len(script) if end < 0 else end - 1
        elif char in "<>":
            redirection = _REDIRECTION.match(script, index)
            if redirection is None or redirection.group(0).startswith("<<"):
                return None
            if word.isdigit():
                word = ""
            end_word()
            index = redirection.end() - 1
        else:
            piece_end = _end_of_piece(script, index)
            if piece_end is None:
                return None
            word += script[index:piece_end]
            index = piece_end - 1
        index += 1
    end_word()
    return tokens


def _end_of_piece(script: str, index: int) -> int | None:
    """Where the quoted string, substitution or character at `index` ends; None if it does not."""
    char = script[index]
    if char == "\\":
        return index + 2 if index + 1 < len(script) else None
    if char in "'`":
        end = script.find(char, index + 1)
        return end + 1 if end >= 0 else None
    if char == "$" and script[index + 1 : index + 2] in ("(", "{"):
        return _end_of_nested(script, index + 1)
    if char != '"':
        return index + 1
    index += 1
    while index < len(script) and script[index] != '"':
        if script[index] == "'":
            index += 1
            continue
        piece_end = _end_of_piece(script, index)
        if piece_end is None:
            return None
        index = piece_end
    return index + 1 if index < len(script) else None


def _end_of_nested(script: str, index: int) -> int | None:
    opening, closing = script[index], ")" if script[index] == "(" else "}"
    depth = 0
    while index < len(script):
        if script[index] == opening:
            depth += 1
        elif script[index] == closing:
            depth -= 1
            if depth == 0:
                return index + 1
        elif script[index] in "'\"\\":
            piece_end = _end_of_piece(script, index)
            if piece_end is None:
                return None
            index = piece_end
            continue
        index += 1
    return None


def _expand_shell(token: str, variables: Mapping[str, str | None], positional: Sequence[str]) -> list[str]:
    """One raw token as the words that the shell would make of it."""
    if token in ('"$@"', "$@", "$*", '"${@}"', "${@}"):
        return list(positional[1:])
    pieces = re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^'\"\\]+", token, re.DOTALL)
    text = "".join(_expand_piece(piece, variables, positional) for piece in pieces)
    unquoted = not any(piece[0] in "'\"" for piece in pieces)
    if unquoted and "$" in token and UNKNOWN not in text:
        return text.split()  # an unquoted variable is split into words, and an empty one vanishes
    return [text]


def _expand_piece(piece: str, variables: Mapping[str, str | None], positional: Sequence[str]) -> str:
    if piece.startswith("'"):
        return piece[1:-1]
    if piece.startswith("\\"):
        return piece[1:]
    text = re.sub(r'\\(["\\$`])', r"\1", piece[1:-1]) if piece.startswith('"') else piece
    if "`" in text:
        return UNKNOWN

    def expand(match: re.Match[str]) -> str:
        name = match.group(1) or match.group(2)
        if name is None:
            special = match.group(5)
            if special and special.isdigit():
                number = int(special)
                return positional[number] if number < len(positional) else ""
            if special in ("@", "*"):
                return " ".join(positional[1:])
            return UNKNOWN  # $(command), $?, $#, ...
        operator, alternative = match.group(3), match.group(4) or ""
        value = variables.get(name, UNKNOWN)
        if value is None or value == UNKNOWN:
            # the image may set it: even a default is a guess
            return UNKNOWN
        if operator == "+":
            return alternative if value else ""
        if operator in ("-", "=") and not value:
            return alternative
        return value

    return _SHELL_VARIABLE.sub(expand, text)
