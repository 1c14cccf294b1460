"""A Python of its own in which Triton interprets kernels: TRITON_INTERPRET must be set before Triton is imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar
from unittest import mock

P = ParamSpec("P")
R = TypeVar("R")
Interpret = Callable[..., Any]


@contextmanager
def interpreter() -> Iterator[Interpret]:
    """Yields call(function, *arguments): what the module-level `function` returns over there. It is started once, at the first call."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_start) as pool:

        def call(function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
            with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
                return pool.submit(function, *arguments, **keywords).result()

        yield call


def _start() -> None:
    import torch
    import triton

    assert triton.knobs.runtime.interpret, "Triton was imported before TRITON_INTERPRET was set"
    torch.set_num_threads(1)
    _teach_bf16()


def _teach_bf16() -> None:
    """The interpreter holds bf16 as 16 bits that it takes for integers in a product, and casts to it by cutting bits off. A GPU rounds to
    the nearest, and multiplies."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def wide(x: Any) -> Any:
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data

    def cast_rounding(self: Any, x: Any, dtype: Any) -> Any:
        if (x.dtype.scalar, dtype.scalar) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(x.data).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return TensorHandle(np.where(np.isnan(x.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)
        return cast(self, x, dtype)

    def dot(self: Any, a: Any, b: Any, d: Any, *options: object) -> Any:
        return TensorHandle(np.matmul(wide(a), wide(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_rounding, dot
