"""recgen: from the equation of a linear recurrence to Triton kernels, forward and backward.

    import recgen

    kda = recgen.load("kda")                 # of the zoo
    mine = recgen.load("my.rec")             # from a file
    op = recgen.compile(text, name="op")     # from text

    o, state = kda(q, k, v, g, beta, output_final_state=True)

Each is the callable of the package that `recgen generate` would write, generated once into a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recgen.errors import RecgenError, SpecError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

__version__ = "0.1.0"
__all__ = ["RecgenError", "SpecError", "__version__", "compile", "load"]


def load(spec: str | os.PathLike[str]) -> Callable[..., Any]:
    """The op of a spec: the name of a zoo member, or the path of a `.rec` file.

    Raises SpecError when the spec is wrong and RecgenError when there is no such spec.
    """
    from recgen.cache import op
    from recgen.resources import find

    return op(find(spec))


def compile(text: str, *, name: str = "recurrence") -> Callable[..., Any]:
    """The op of a spec given as text. `name` is what the op and its package are called.

    Raises SpecError when the spec is wrong.
    """
    from recgen.cache import op
    from recgen.resources import Source

    return op(Source(name=name, path="<text>", text=text))
