"""Kubernetes quantities as exact whole bytes. Pure, standard library only; operator, daemon, tools and tests call it.

A quantity is a decimal number with a binary (Ki, Mi ...), decimal (k, M ...) or exponent (1e11) suffix. Nothing here
goes through a float: 9007199254740993 stays what it is, and `0.5Gi` is 536870912. What is no whole number of bytes,
negative or beyond int64 is refused, and the message says what would be taken.
"""

import re
from fractions import Fraction

from kvoffload.errors import InvalidSpec

MAX_BYTES = 2**63 - 1
"""Kubernetes stores counts of bytes as int64."""

MAX_DIGITS = 100
"""Longer texts are no quantity: no count of bytes has so many digits, and Python reads at most 4,300."""

QUANTITY_PATTERN = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?[0-9]{1,2})?$"
"""What the API server's schema takes; a minus sign is left out because no bytes are negative."""

WRITE_A_SUFFIX = "write Ki, Mi, Gi, Ti, Pi, Ei (powers of 1024), k, M, G, T, P, E (of 1000), or bytes without a suffix"
"""The remedy where a suffix is none, for people."""

_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_EXPONENT = re.compile(r"^[eE][+-]?[0-9]{1,2}$")
_QUANTITY = re.compile(r"^([+-]?)([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([A-Za-z]*|[eE][+-]?[0-9]{1,2})$")


def parse_quantity(value: "str | int | float") -> int:
    """Bytes of a quantity as it stands in a manifest (string or number) or a flag.

    A float is taken only where it names one integer exactly (YAML readers turn `1e11` into one).

    Raises:
        InvalidSpec: no quantity, negative, beyond int64, or no whole number of bytes.
    """
    if isinstance(value, bool):
        raise InvalidSpec(f"{value} is no quantity; write bytes such as 107374182400 or 100Gi")
    if isinstance(value, float):
        if not value.is_integer() or abs(value) > 2**53:
            raise InvalidSpec(f"{value!r} names no exact number of bytes; write it as a string such as '100Gi'")
        value = int(value)
    if isinstance(value, int):
        return _checked(Fraction(value), str(value))
    return _checked(exact_quantity(value), value)


def exact_quantity(value: str) -> Fraction:
    """The number that a quantity is, also where it is no number of bytes: negative, a fraction, beyond int64.

    Raises:
        InvalidSpec: no quantity.
    """
    match = _QUANTITY.match(value) if len(value) <= MAX_DIGITS else None
    if match is None:
        raise InvalidSpec(f"{value[:MAX_DIGITS]!r} is no quantity; write bytes such as 107374182400, 100Gi or 1e11")
    sign, digits, suffix = match.groups()
    number = Fraction(digits + "0" if digits.endswith(".") else digits)
    if suffix in _BINARY:
        number *= 2 ** _BINARY[suffix]
    elif suffix in _DECIMAL:
        number *= Fraction(10) ** _DECIMAL[suffix]
    elif _EXPONENT.match(suffix):
        number *= Fraction(10) ** int(suffix[1:])
    else:
        raise InvalidSpec(f"{value!r} has an unknown suffix {suffix!r}; {WRITE_A_SUFFIX}")
    return -number if sign == "-" else number


def _checked(number: Fraction, text: str) -> int:
    if number < 0:
        raise InvalidSpec(f"{text} is negative; bytes are 0 or more")
    if number > MAX_BYTES:
        raise InvalidSpec(f"{text} is more than {MAX_BYTES} bytes, the largest int64")
    if number.denominator != 1:
        below = number.numerator // number.denominator
        raise InvalidSpec(f"{text} is no whole number of bytes; the nearest are {below} and {below + 1}")
    return int(number)


def nearest_multiples(num_bytes: int, page_bytes: int) -> "tuple[int, int]":
    """The multiples of `page_bytes` just below and above (equal to `num_bytes` twice if it is one)."""
    below = num_bytes // page_bytes * page_bytes
    return below, below if below == num_bytes else below + page_bytes


def format_bytes(num_bytes: int) -> str:
    """The shortest quantity that is exactly this many bytes: `256Mi`, `1025Ki`, `1000`."""
    for suffix, shift in reversed(_BINARY.items()):
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{suffix}"
    return str(num_bytes)


def round_bytes(num_bytes: int) -> str:
    """A short quantity for people, rounded to a tenth of its unit: `256Mi`, `12.3Gi`, `1000`."""
    for suffix, shift in reversed(_BINARY.items()):
        if num_bytes >> shift:
            whole, tenth = divmod((num_bytes * 10 + (1 << shift - 1)) >> shift, 10)
            return f"{whole}.{tenth}{suffix}" if tenth else f"{whole}{suffix}"
    return str(num_bytes)
