"""Where the zoo and the templates are, and how a spec is found and read.

In a checkout `specs/` and `templates/` stand beside the package `recgen/`; in an installed wheel they are inside it.
"""

from __future__ import annotations

import difflib
import keyword
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from recgen.errors import RecgenError

SUFFIX = ".rec"


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a spec, before anything is known about it."""

    name: str  # of the op and of its package: the file's name without .rec
    path: str  # as errors print it
    text: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or keyword.iskeyword(self.name):
            raise RecgenError(f"{self.path}: the name of a spec becomes a Python module and function, and {self.name!r} cannot be one")


@cache
def folder(kind: Literal["specs", "templates"]) -> Path:
    """The folder of that kind that belongs to this recgen."""
    package = Path(__file__).resolve().parent
    for place in (package / kind, package.parent / kind):
        if place.is_dir():
            return place
    raise RecgenError(f"this installation of recgen is incomplete: no folder {kind}/ in {package} or beside it")


def specs_folder() -> Path:
    """The specs that a command means when it names none: ./specs where the working folder has one, else the zoo."""
    here = Path("specs")
    return here if any(here.glob(f"*{SUFFIX}")) else folder("specs")


def read(path: str | os.PathLike[str]) -> Source:
    """Read the spec at `path`."""
    file = Path(path)
    shown = os.fspath(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecgenError(f"{shown}: a spec is UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise RecgenError(f"{shown}: cannot read the spec: {error.strerror}") from None
    return Source(name=file.stem, path=shown, text=text)


def read_all(specs: Path) -> tuple[Source, ...]:
    """Every spec of a folder, by name."""
    return tuple(read(path) for path in sorted(specs.glob(f"*{SUFFIX}")))


def find(spec: str | os.PathLike[str], specs: Path | None = None) -> Source:
    """The spec that `spec` means: a path, or the name of a spec in the folder `specs` or in the zoo."""
    shown = os.fspath(spec)
    if not isinstance(spec, str) or shown.endswith(SUFFIX) or os.sep in shown:
        return read(spec)
    folders = [folder("specs")] if specs is None else [specs, folder("specs")]
    for place in folders:
        if (path := place / f"{shown}{SUFFIX}").is_file():
            return read(_relative(path))
    known = sorted({path.stem for place in folders for path in place.glob(f"*{SUFFIX}")})
    close = difflib.get_close_matches(shown, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}."
    raise RecgenError(f"no spec named {shown!r}; {hint} A file is given by its path: {shown}{SUFFIX}")


def _relative(path: Path) -> Path:
    """The same file relative to the working folder where it lies in it: errors and diffs read better."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
