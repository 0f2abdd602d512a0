"""Parameters whose values are elsewhere: still the right shape, but reading one is an error or a wait, never a wrong number.

Note [Guarded parameters]
-------------------------
Between release and gather a stage-3 parameter keeps its shape, dtype and identity, but its storage is empty. A
placeholder of another shape breaks `numel()`, and a broadcastable one gives wrong numbers without a word. So while its
value is away the parameter's class is `GuardedParameter`, whose `__torch_function__` stops every operation except
questions of shape. A gathered parameter is a plain `nn.Parameter` again and costs nothing extra.
The same class makes a read wait for the values that `publish` is still bringing (stages 1 and 2).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.core.errors import RunFailed

_T = torch.Tensor
_ASKS_SHAPE = {
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.stride, _T.is_floating_point,
    _T.is_complex, _T.is_contiguous, _T.get_device, _T.requires_grad_, _T.register_hook, _T.__hash__, _T.storage_offset,
    _T.register_post_accumulate_grad_hook, _T.is_set_to, _T.__len__, _T.untyped_storage, _T.data_ptr,
    torch.is_floating_point, torch.numel,
    *(getattr(_T, name).__get__ for name in (
        "shape", "ndim", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "is_cuda", "is_sparse",
        "is_quantized", "is_meta", "is_cpu", "_version", "_backward_hooks", "itemsize", "nbytes", "retains_grad",
    )),
    *(getattr(getattr(_T, name), verb) for name, verb in (
        ("grad", "__set__"), ("grad", "__delete__"), ("requires_grad", "__set__"),
    )),
}  # fmt: skip


class GuardedParameter(nn.Parameter):
    """An `nn.Parameter` whose value is not here; see Note [Guarded parameters]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _ASKS_SHAPE:
            for parameter in _guarded((*args, *kwargs.values())):
                parameter._zero_unit.touch(parameter, func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Parameter(value away, shape={tuple(self.shape)}, dtype={self.dtype})"


def _guarded(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _guarded(value)
        elif type(value) is GuardedParameter:
            yield value


def guard(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.__class__ = GuardedParameter


def unguard(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.__class__ = nn.Parameter


def refuse(name: str, func: Any) -> None:
    """Raises for a read of a released parameter."""
    raise RunFailed(
        f"parameter {name!r} was used by {getattr(func, '__name__', func)!r} while its value is sharded over the ranks "
        f"(stage 3 gathers it only while its own module runs). Use it inside that module's forward, or read it inside "
        f"`with engine.gathered():`, or ask `engine.full({name!r})`."
    )
