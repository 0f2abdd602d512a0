"""Which dtype a parameter computes in, and which one its master copy, gradients' sums and moments have."""

from dataclasses import dataclass

import torch

from paceline.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Precision:
    """`compute` replaces float32 in forward and backward; None leaves every parameter in its own dtype.

    Sums, norms, master copies and moments are never narrower than float32: 1.0 plus 100 updates of 1e-4 stays 1.0 in
    bfloat16, and 1,000 gradients of 0.01 add up to 4.0.
    """

    name: str
    compute: torch.dtype | None

    def of(self, dtype: torch.dtype) -> torch.dtype:
        return self.compute if self.compute is not None and dtype == torch.float32 else dtype

    @staticmethod
    def master(dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, torch.float32)

    def cast_inputs(self, value: object) -> object:
        """Floating-point inputs in the compute dtype, so that a bf16 weight meets a bf16 activation."""
        if self.compute is None:
            return value
        if isinstance(value, torch.Tensor):
            return value.to(self.compute) if value.dtype == torch.float32 else value
        if isinstance(value, dict):
            return type(value)((k, self.cast_inputs(v)) for k, v in value.items())
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self.cast_inputs(v) for v in value)
        return value


PRECISIONS = {"fp32": Precision("fp32", None), "bf16": Precision("bf16", torch.bfloat16)}


def precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise InputError(f"precision {name!r}: Paceline trains in {', '.join(PRECISIONS)}; choose one of them.")
    return PRECISIONS[name]
