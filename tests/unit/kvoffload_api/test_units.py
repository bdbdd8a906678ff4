"""Quantities are exact (case 28)."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import InvalidSpec
from kvoffload.units import format_bytes, nearest_multiples, parse_quantity, round_bytes


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (107374182400, 107374182400),
        ("100Gi", 107374182400),
        ("1e11", 100_000_000_000),
        (1e11, 100_000_000_000),
        ("0.5Gi", 536870912),
        ("100G", 100_000_000_000),
        (2**53 + 1, 2**53 + 1),
        (str(2**53 + 1), 2**53 + 1),
        ("1E", 10**18),
        ("1.5Ki", 1536),
        ("2000m", 2),
        ("+5", 5),
        ("5.", 5),
        (".5Ki", 512),
        (0, 0),
    ],
)
def test_a_quantity_is_exactly_its_bytes(value: str | int | float, num_bytes: int) -> None:
    assert parse_quantity(value) == num_bytes


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-1, "negative"),
        ("-5Gi", "negative"),
        ("1.5", "the nearest are 1 and 2"),
        ("0.1Gi", "the nearest are 107374182 and 107374183"),
        ("1m", "the nearest are 0 and 1"),
        (0.5, "no exact number"),
        (float(2**60), "no exact number"),
        (2**63, "largest int64"),
        ("99999999999999999999", "largest int64"),
        ("1e99", "largest int64"),
        ("1Xi", "unknown suffix"),
        ("abc", "no quantity"),
        ("", "no quantity"),
        ("1 Gi", "no quantity"),
        ("9" * 5000, "no quantity"),
        (True, "no quantity"),
    ],
)
def test_what_is_no_whole_number_of_bytes_is_refused_with_what_would_be(value: str | int | float, said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        parse_quantity(value)


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_formatting_and_parsing_lose_nothing(num_bytes: int) -> None:
    assert parse_quantity(format_bytes(num_bytes)) == num_bytes
    assert parse_quantity(num_bytes) == parse_quantity(str(num_bytes)) == num_bytes


@given(st.integers(min_value=0, max_value=2**62), st.sampled_from([2 << 20, 1 << 30]))
def test_nearest_multiples_enclose_the_number(num_bytes: int, page_bytes: int) -> None:
    below, above = nearest_multiples(num_bytes, page_bytes)
    assert below % page_bytes == above % page_bytes == 0
    assert below <= num_bytes <= above
    assert above - below in (0, page_bytes)


def test_case_20_capacity_of_one_byte_too_many_has_two_neighbours() -> None:
    assert nearest_multiples((100 << 20) + 1, 2 << 20) == (100 << 20, 102 << 20)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0"),
        (1000, "1000"),
        (256 << 20, "256Mi"),
        (13207024435, "12.3Gi"),
        (1023 << 20, "1023Mi"),
        ((1 << 30) - 1, "1024Mi"),
        (2**60, "1Ei"),
    ],
)
def test_a_rounded_quantity_is_short(num_bytes: int, text: str) -> None:
    assert round_bytes(num_bytes) == text


@given(st.integers(min_value=1, max_value=2**60))
def test_a_rounded_quantity_is_off_by_a_twentieth_of_its_unit_at_most(num_bytes: int) -> None:
    text = round_bytes(num_bytes)
    unit = parse_quantity("1" + text.lstrip("0123456789."))
    assert abs(Fraction(text.rstrip("KMGTPEi")) * unit - num_bytes) <= Fraction(unit, 20)
