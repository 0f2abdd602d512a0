"""Quantities are exact, typed, and refuse what has no clear meaning."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError, nearest_name
from paceline.core.quantity import Kind, Quantity, parse


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("80GiB", Kind.BYTES, 80 * 1024**3),
        ("80GB", Kind.BYTES, 80 * 10**9),
        ("2Mtok", Kind.TOKENS, 2_000_000),
        ("64ktok", Kind.TOKENS, 64_000),
        ("64Kitok", Kind.TOKENS, 65_536),
        ("64_000 tok", Kind.TOKENS, 64_000),
        ("32seq", Kind.SEQUENCES, 32),
        ("30min", Kind.TIME, 1800),
        ("0.1min", Kind.TIME, 6),
        ("3%", Kind.FRACTION, Fraction(3, 100)),
        ("0.1%", Kind.FRACTION, Fraction(1, 1000)),
        ("100steps", Kind.STEPS, 100),
        ("1step", Kind.STEPS, 1),
        ("1.5e9tok", Kind.TOKENS, 1_500_000_000),
    ],
)
def test_amounts_are_exact(text: str, kind: Kind, amount: int | Fraction) -> None:
    assert parse(text) == Quantity.of(amount, kind)


@pytest.mark.parametrize(
    ("text", "kinds", "says"),
    [
        ("64", (Kind.TOKENS, Kind.SEQUENCES), "'64' has no unit"),
        ("64", (Kind.TOKENS, Kind.SEQUENCES), "write it like 64ktok or 32seq"),
        ("64KTOK", (Kind.TOKENS,), "did you mean 'ktok'?"),
        ("80Gib", (Kind.BYTES,), "did you mean 'GiB'?"),
        ("3%", (Kind.STEPS,), "counts fraction, but steps are wanted"),
        ("many", (Kind.STEPS,), "is not a number with a unit"),
        ("", (Kind.STEPS,), "is not a number with a unit"),
        ("-3steps", (Kind.STEPS,), "is negative"),
        ("3 parsecs", (Kind.TIME,), "unknown unit 'parsecs'"),
    ],
)
def test_a_wrong_quantity_names_value_rule_and_remedy(text: str, kinds: tuple[Kind, ...], says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, *kinds)
    assert says in str(caught.value)
    assert repr(text) in str(caught.value)


def test_whole_refuses_a_part_of_a_step() -> None:
    assert parse("1.5kseq").whole == 1500
    with pytest.raises(InputError, match=r"1\.5steps is not a whole number of steps"):
        _ = parse("1.5steps").whole


@given(st.integers(0, 10**15), st.sampled_from(list(Kind)), st.sampled_from([1, 2, 4, 10, 1000]))
def test_text_parses_back_to_the_same_quantity(amount: int, kind: Kind, divisor: int) -> None:
    quantity = Quantity.of(Fraction(amount, divisor), kind)
    assert parse(str(quantity), kind) == quantity


def test_text_is_the_short_one() -> None:
    assert [str(parse(text)) for text in ("80GiB", "64ktok", "3%", "1800s", "100steps")] == [
        "80GiB",
        "64ktok",
        "3%",
        "30min",
        "100steps",
    ]


def test_nearest_name() -> None:
    assert nearest_name("Warmpup", ["warmup", "decay"]) == "warmup"
    assert nearest_name("zzz", ["warmup", "decay"]) is None


def test_text_of_an_amount_without_decimal_form_is_marked() -> None:
    assert str(Quantity.of(Fraction(1, 3), Kind.TIME)) == "~0.333333s"
