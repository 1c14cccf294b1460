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
