"""inlined: the text of the constant code that is copied into emitted packages, read without importing it.

`primitives`, `torch_primitives` and `runtime` are real modules that tests import; importing them here would import torch and Triton, which
takes longer than compiling a spec.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


def text(module: str) -> str:
    """A module of recgen as it stands."""
    return (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")


@cache
def functions(module: str) -> dict[str, str]:
    """The functions of a module by name, with their decorators, in the order of the file."""
    source = text(module)
    rows = source.splitlines()
    return {
        node.name: "\n".join(rows[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
