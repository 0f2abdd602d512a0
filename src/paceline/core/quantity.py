"""Quantities with units, exact: `80GiB`, `2Mtok`, `64ktok`, `32seq`, `30min`, `3%`, `100steps`.

A bare number is refused wherever a unit decides the meaning. Amounts are fractions, never floats: `0.1min` is 6 seconds.
Prefixes are those of the SI: `k` is 1000 and `Ki` is 1024, for tokens as for bytes.
"""

import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Self

from paceline.core.errors import InputError, nearest_name

__all__ = ["Kind", "Quantity", "parse"]


class Kind(Enum):
    """What a quantity counts; the value is the name used in messages."""

    BYTES = "bytes"
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    STEPS = "steps"
    TIME = "time"
    FRACTION = "fraction"


_UNITS: dict[Kind, dict[str, Fraction]] = {
    Kind.BYTES: {
        "B": Fraction(1),
        **{f"{prefix}B": Fraction(1000**power) for power, prefix in enumerate(("k", "M", "G", "T", "P"), start=1)},
        **{f"{prefix}iB": Fraction(1024**power) for power, prefix in enumerate(("K", "M", "G", "T", "P"), start=1)},
    },
    Kind.TOKENS: {
        "tok": Fraction(1),
        **{f"{prefix}tok": Fraction(1000**power) for power, prefix in enumerate(("k", "M", "G", "T"), start=1)},
        **{f"{prefix}itok": Fraction(1024**power) for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
    },
    Kind.SEQUENCES: {"seq": Fraction(1), "kseq": Fraction(1000)},
    Kind.STEPS: {"steps": Fraction(1), "step": Fraction(1)},
    Kind.TIME: {
        "s": Fraction(1),
        "ms": Fraction(1, 1000),
        "min": Fraction(60),
        "h": Fraction(3600),
        "d": Fraction(86400),
    },
    Kind.FRACTION: {"%": Fraction(1, 100)},
}
_EXAMPLE = {
    Kind.BYTES: "80GiB",
    Kind.TOKENS: "64ktok",
    Kind.SEQUENCES: "32seq",
    Kind.STEPS: "100steps",
    Kind.TIME: "30min",
    Kind.FRACTION: "3%",
}
_KIND_OF_UNIT = {unit: kind for kind, units in _UNITS.items() for unit in units}
_SHAPE = re.compile(r"\s*([+-]?[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][+-]?[0-9]+)?|[+-]?\.[0-9]+)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True, slots=True)
class Quantity:
    """An exact amount of one kind, in its base unit (bytes, tokens, sequences, steps, seconds, a share of one).

    Two quantities are equal when kind and amount are: `60s == 1min`. `str()` takes the largest unit that gives a whole number.
    """

    amount: Fraction
    kind: Kind

    @classmethod
    def of(cls, amount: int | Fraction, kind: Kind) -> Self:
        """Return `amount` base units of `kind`."""
        return cls(Fraction(amount), kind)

    @property
    def whole(self) -> int:
        """The amount as an integer of base units.

        Raises:
            InputError: the amount is not whole, such as `1.5steps` or `0.5B`.
        """
        if self.amount.denominator != 1:
            raise InputError(f"{self} is not a whole number of {self.kind.value}: write a whole amount.")
        return self.amount.numerator

    @property
    def seconds(self) -> float:
        """The amount of a time in seconds."""
        assert self.kind is Kind.TIME, self.kind
        return float(self.amount)

    def __str__(self) -> str:
        exact: list[tuple[bool, Fraction | int, str]] = []
        for unit, size in _UNITS[self.kind].items():
            number = _decimal(self.amount / size)
            if number is not None and (unit != "step" or self.amount == 1):
                exact.append(("." in number, len(number) if "." in number else self.amount / size, number + unit))
        return min(exact)[2] if exact else f"~{float(self.amount):.6g}{next(iter(_UNITS[self.kind]))}"


def parse(text: str, *kinds: Kind) -> Quantity:
    """Read a quantity such as `64ktok`; `kinds` are those allowed here (none given: all).

    Raises:
        InputError: no number, no unit, an unknown unit, a unit of another kind, or a negative amount.
    """
    allowed = kinds or tuple(Kind)
    examples = " or ".join(_EXAMPLE[kind] for kind in allowed)
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a number with a unit: write it like {examples}.")
    number, unit = match.groups()
    if not unit:
        raise InputError(f"{text!r} has no unit, and without one its meaning is open: write it like {examples}.")
    kind = _KIND_OF_UNIT.get(unit)
    if kind is None:
        raise InputError(f"{text!r} has the unknown unit {unit!r}: {_unit_advice(unit, allowed)}")
    if kind not in allowed:
        wanted = " or ".join(kind.value for kind in allowed)
        raise InputError(f"{text!r} counts {kind.value}, but {wanted} are wanted here: write it like {examples}.")
    amount = Fraction(number.replace("_", "")) * _UNITS[kind][unit]
    if amount < 0:
        raise InputError(f"{text!r} is negative: an amount is zero or more.")
    return Quantity(amount, kind)


def _unit_advice(unit: str, allowed: tuple[Kind, ...]) -> str:
    known = [name for kind in allowed for name in _UNITS[kind]]
    near = nearest_name(unit, known)
    listed = ", ".join(known)
    return f"did you mean {near!r}? Units allowed here: {listed}." if near else f"units allowed here: {listed}."


def _decimal(value: Fraction) -> str | None:
    """Return the exact decimal text of `value`, or None for one that has none (a third) or an endless-looking one."""
    rest, places = value.denominator, 0
    while rest % 2 == 0 or rest % 5 == 0:
        rest, places = rest // (10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5), places + 1
    if rest != 1 or places > 30:
        return None
    digits = str(value * 10**places).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}" if places else digits
