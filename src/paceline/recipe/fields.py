"""Scalar types of a recipe: strict about meaning, easy about spelling.

`"8"` and `8` mean the same and are both taken as 8; `true` is not 1, `8.5` is not 8, and a number without a unit is not a
quantity. Each validator says what it wants in words, since its message is what the user reads.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar, cast

from pydantic import PlainValidator

from paceline.core.errors import InputError
from paceline.core.quantity import Kind, Quantity, parse

__all__ = [
    "AutoQuantity",
    "AutoStage",
    "AutoWhole",
    "Betas",
    "Flag",
    "HeldOut",
    "Length",
    "OptionalNumber",
    "OptionalPace",
    "OptionalText",
    "OptionalWhole",
    "Pace",
    "Period",
    "Positive",
    "Probability",
    "Seed",
    "Share",
    "Size",
    "Sources",
    "Text",
    "TokenCount",
    "Whole",
]

T = TypeVar("T")

_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9_]*)")
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def whole(value: object, *, least: int) -> int:
    """Read a whole number of at least `least`: 8, `"8"`, `8.0` and `1e4`, but neither `true` nor `8.5`."""
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif (isinstance(value, float) and value.is_integer()) or (isinstance(value, str) and _WHOLE.fullmatch(value)):
        number = int(value)
    if number is None:
        raise ValueError(f"must be a whole number of at least {least}")
    if number < least:
        raise ValueError(f"must be at least {least}")
    return number


def real(value: object, *, least: float, most: float = math.inf, open_low: bool = False) -> float:
    """Read a finite number from `least` (or above it, `open_low`) to `most`; `"3e-4"` is one, `true` is not."""
    number: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            number = None
    if number is None or not math.isfinite(number):
        raise ValueError("must be a finite number, such as 0.1 or 3e-4")
    if number < least or (open_low and number == least) or number > most:
        low = f"above {least:g}" if open_low else f"at least {least:g}"
        raise ValueError(f"must be {low}" + ("" if math.isinf(most) else f" and at most {most:g}"))
    return number


def stage(value: object) -> int:
    """Read a ZeRO stage, 0 to 3."""
    try:
        number = whole(value, least=0)
    except ValueError:
        number = -1
    if number not in (0, 1, 2, 3):
        raise ValueError("must be a ZeRO stage: 0, 1, 2, 3")
    return number


def flag(value: object) -> bool:
    """Read `true` or `false` (also yes, no, on, off); a number is not a flag."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    raise ValueError("must be true or false")


def text(value: object) -> str:
    """Read a text that is not empty; a number must be put in quotes to be one."""
    if isinstance(value, str) and value.strip():
        return value
    quoted = f'; in quotes it would be one: "{value}"' if isinstance(value, (int, float)) else ""
    raise ValueError(f"must be a text{quoted}")


def quantity(value: object, *kinds: Kind) -> Quantity:
    """Read a quantity of one of the `kinds`."""
    if isinstance(value, Quantity):
        value = str(value)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("must be a number with a unit")
    try:
        found = parse(str(value), *kinds)
        if found.kind in (Kind.STEPS, Kind.TOKENS, Kind.SEQUENCES):
            _ = found.whole
    except InputError as error:
        raise ValueError(str(error).rstrip(".")) from None
    return found


def above_zero(value: object, *kinds: Kind) -> Quantity:
    """Read a quantity that is more than zero."""
    found = quantity(value, *kinds)
    if found.amount == 0:
        raise ValueError("must be more than zero")
    return found


def share(value: object) -> Quantity:
    """Read a share of one, from 0% to 100%."""
    return _at_most_all(quantity(value, Kind.FRACTION))


def pace(value: object) -> Quantity:
    """Read a part of the run: a share of it (`3%`) or a number of steps (`100steps`)."""
    return _at_most_all(quantity(value, Kind.FRACTION, Kind.STEPS))


def sources(value: object) -> tuple[str, ...]:
    """Read one source of text or a list of them."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("must be a path, a list of paths, or stdlib")
    return tuple(text(item) for item in cast("Sequence[object]", value))


def held_out(value: object) -> tuple[str, ...] | Quantity | None:
    """Read where evaluation text comes from: a share held out of the training text, sources, or `none`."""
    if _is_none(value):
        return None
    if isinstance(value, Quantity) or (isinstance(value, str) and value.strip().endswith("%")):
        found = share(value)
        if not 0 < found.amount < 1:
            raise ValueError("must lie between 0% and 100%, both excluded; `none` turns evaluation off")
        return found
    return sources(value)


def betas(value: object) -> tuple[float, float]:
    """Read the two decay rates of Adam."""
    pair = cast("Sequence[object]", value) if isinstance(value, (list, tuple)) else ()
    if len(pair) != 2:
        raise ValueError("must be two numbers, such as [0.9, 0.95]")
    low, high = (real(item, least=0.0, most=1.0) for item in pair)
    if max(low, high) >= 1.0:
        raise ValueError("must be two numbers below 1, such as [0.9, 0.95]")
    return low, high


def _at_most_all(found: Quantity) -> Quantity:
    if found.kind is Kind.FRACTION and found.amount > 1:
        raise ValueError("must be at most 100%")
    return found


def _is_none(value: object) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null", "off"))


def _or_none(read: Callable[[object], T]) -> Callable[[object], T | None]:
    return lambda value: None if _is_none(value) else read(value)


def _or_auto(read: Callable[[object], T]) -> Callable[[object], T | Literal["auto"]]:
    def either(value: object) -> T | Literal["auto"]:
        if value == "auto":
            return "auto"
        try:
            return read(value)
        except ValueError as error:
            raise ValueError(f"{error}, or auto") from None

    return either


Whole = Annotated[int, PlainValidator(lambda value: whole(value, least=1))]
Seed = Annotated[int, PlainValidator(lambda value: whole(value, least=0))]
Length = Annotated[int, PlainValidator(lambda value: whole(value, least=2))]
AutoWhole = Annotated[int | Literal["auto"], PlainValidator(_or_auto(lambda value: whole(value, least=1)))]
OptionalWhole = Annotated[int | None, PlainValidator(_or_none(lambda value: whole(value, least=1)))]
AutoStage = Annotated[int | Literal["auto"], PlainValidator(_or_auto(stage))]
Positive = Annotated[float, PlainValidator(lambda value: real(value, least=0.0, open_low=True))]
Size = Annotated[float, PlainValidator(lambda value: real(value, least=0.0))]
Probability = Annotated[float, PlainValidator(lambda value: real(value, least=0.0, most=1.0))]
OptionalNumber = Annotated[float | None, PlainValidator(_or_none(lambda value: real(value, least=0.0, open_low=True)))]
Betas = Annotated[tuple[float, float], PlainValidator(betas)]
Flag = Annotated[bool, PlainValidator(flag)]
Text = Annotated[str, PlainValidator(text)]
OptionalText = Annotated[str | None, PlainValidator(_or_none(text))]
Sources = Annotated[tuple[str, ...], PlainValidator(sources)]
HeldOut = Annotated[tuple[str, ...] | Quantity | None, PlainValidator(held_out)]
Share = Annotated[Quantity, PlainValidator(share)]
Pace = Annotated[Quantity, PlainValidator(pace)]
OptionalPace = Annotated[
    Quantity | None,
    PlainValidator(_or_none(lambda value: _at_most_all(above_zero(value, Kind.STEPS, Kind.FRACTION)))),
]
AutoQuantity = Annotated[
    Quantity | Literal["auto"],
    PlainValidator(_or_auto(lambda value: above_zero(value, Kind.TOKENS, Kind.SEQUENCES))),
]
TokenCount = Annotated[Quantity | None, PlainValidator(_or_none(lambda value: above_zero(value, Kind.TOKENS)))]
Period = Annotated[
    Quantity | None,
    PlainValidator(_or_none(lambda value: _at_most_all(above_zero(value, Kind.STEPS, Kind.FRACTION, Kind.TIME)))),
]
