"""Just enough of the shell to read `sh -c` scripts of manifests: words, quotes, variables, simple commands. Pure.

Called by `command_line.py`. Nothing is run and nothing is guessed: command substitutions, variables that the image may
set, here-documents and unbalanced quotes are unknown. A script is its pod's text: what is made of it is asked of a
budget first, and no regular expression goes over the same characters twice.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvoffload_operator.webhook.text_budget import COMMAND_CHARACTERS, TextBudget

UNKNOWN = "\x00unknown"
"""Stands in a word for what cannot be told."""

ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_SHELL_VARIABLE = re.compile(
    r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)(?::?([-+=?])([^}]*))?\}|([@*#?0-9!$-])|\()"
)
_PIECE = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^'\"\\]+", re.DOTALL)
MAX_NESTING = 16
"""Quotes and substitutions inside each other; a script with more is not split."""
_REDIRECTION = re.compile(r"(?:<<?<?|>>?)[&|]?[ \t]*(?:'[^']*'|\"[^\"]*\"|[^\s;&|()<>'\"]+)")


@dataclass(slots=True)
class _Scope:
    """What a script's words are expanded with."""

    environment: Mapping[str, str | None]
    positional: Sequence[str]
    budget: TextBudget
    assigned: dict[str, str | None] = field(default_factory=dict)
    """By the script itself, and kept for what follows."""

    def value_of(self, name: str) -> str | None:
        """The variable's value, None or UNKNOWN where it cannot be told."""
        return self.assigned[name] if name in self.assigned else self.environment.get(name, UNKNOWN)

    def assign(self, word: str) -> None:
        """Take `NAME=value`."""
        name, _, value = word.partition("=")
        self.assigned[name] = None if UNKNOWN in value else value


def simple_commands(
    script: str, environment: Mapping[str, str | None], positional: Sequence[str], budget: TextBudget
) -> Iterator[list[str]]:
    """The script's simple commands with what is known put in; a script that cannot be split has none.

    Raises:
        TextTooLong: words and scripts of the pod come to more than the budget.
    """
    budget.spend(len(script))
    tokens = split_script(script)
    if tokens is None:
        return
    scope = _Scope(environment, positional, budget)
    simple: list[str] = []
    for token in [*tokens, None]:
        if token is not None:
            simple.extend(_expand_shell(token, scope))
            continue
        if simple:
            budget.spend(COMMAND_CHARACTERS)
        assigned = list(_leading_assignments(simple))
        if assigned and len(assigned) == len(simple):
            for word in assigned:
                scope.assign(word)
        elif simple[:1] == ["export"]:
            for word in simple[1:]:
                if ASSIGNMENT.match(word):
                    scope.assign(word)
        else:
            yield simple
        simple = []


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
    word: list[str] = []
    index = 0

    def end_word() -> None:
        if word:
            tokens.append("".join(word))
            word.clear()

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
            if "".join(word).isdigit():
                word.clear()
            end_word()
            index = redirection.end() - 1
        else:
            piece_end = _end_of_piece(script, index)
            if piece_end is None:
                return None
            word.append(script[index:piece_end])
            index = piece_end - 1
        index += 1
    end_word()
    return tokens


def _end_of_piece(script: str, index: int, nesting: int = 0) -> int | None:
    """Where the quoted string, substitution or character at `index` ends; None if it does not."""
    if nesting > MAX_NESTING:
        return None
    char = script[index]
    if char == "\\":
        return index + 2 if index + 1 < len(script) else None
    if char in "'`":
        end = script.find(char, index + 1)
        return end + 1 if end >= 0 else None
    if char == "$" and script[index + 1 : index + 2] in ("(", "{"):
        return _end_of_nested(script, index + 1, nesting)
    if char != '"':
        return index + 1
    index += 1
    while index < len(script) and script[index] != '"':
        if script[index] == "'":
            index += 1
            continue
        piece_end = _end_of_piece(script, index, nesting + 1)
        if piece_end is None:
            return None
        index = piece_end
    return index + 1 if index < len(script) else None


def _end_of_nested(script: str, index: int, nesting: int) -> int | None:
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
            piece_end = _end_of_piece(script, index, nesting + 1)
            if piece_end is None:
                return None
            index = piece_end
            continue
        index += 1
    return None


def _expand_shell(token: str, scope: _Scope) -> list[str]:
    """One raw token as the words that the shell would make of it."""
    if token in ('"$@"', "$@", "$*", '"${@}"', "${@}"):
        scope.budget.spend(_num_characters(scope.positional[1:]))
        return list(scope.positional[1:])
    scope.budget.spend(len(token) + 1)
    pieces = _PIECE.findall(token)
    text = "".join(_expand_piece(piece, scope) for piece in pieces)
    unquoted = not any(piece[0] in "'\"" for piece in pieces)
    if unquoted and "$" in token and UNKNOWN not in text:
        return text.split()  # an unquoted variable is split into words, and an empty one vanishes
    return [text]


def _num_characters(words: Sequence[str]) -> int:
    """Of words with a space after each."""
    return sum(map(len, words)) + len(words)


def _expand_piece(piece: str, scope: _Scope) -> str:
    if piece.startswith("'"):
        return piece[1:-1]
    if piece.startswith("\\"):
        return piece[1:]
    text = re.sub(r'\\(["\\$`])', r"\1", piece[1:-1]) if piece.startswith('"') else piece
    if "`" in text or "${" in text[text.rfind("}") + 1 :]:
        return UNKNOWN  # a substitution, or a `${` that ends in another piece, after a quote

    def expand(match: re.Match[str]) -> str:
        put_in = _expand_variable(match, scope)
        scope.budget.spend(len(put_in))
        return put_in

    return _SHELL_VARIABLE.sub(expand, text)


def _expand_variable(match: re.Match[str], scope: _Scope) -> str:
    name = match.group(1) or match.group(2)
    if name is None:
        special = match.group(5)
        if special and special.isdigit():
            number = int(special)
            return scope.positional[number] if number < len(scope.positional) else ""
        if special in ("@", "*"):
            scope.budget.spend(_num_characters(scope.positional[1:]))
            return " ".join(scope.positional[1:])
        return UNKNOWN  # $(command), $?, $#, ...
    operator, alternative = match.group(3), match.group(4) or ""
    value = scope.value_of(name)
    if value is None or value == UNKNOWN:
        # the image may set it: even a default is a guess
        return UNKNOWN
    if operator == "+":
        return alternative if value else ""
    if operator in ("-", "=") and not value:
        return alternative
    return value
