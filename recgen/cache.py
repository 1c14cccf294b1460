"""The op of a spec in one line: its package is generated once into a cache and imported from there.

An entry is keyed by everything that decides its bytes: the spec, the compiler's own source, the templates. Entries are never changed,
so any number of processes may share a cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from recgen.errors import RecgenError
from recgen.resources import Source, folder

if TYPE_CHECKING:
    from recgen.package import Package

_importing = threading.Lock()


def op(source: Source) -> Callable[..., Any]:
    """The callable that the emitted package names after its spec."""
    function: Callable[..., Any] = getattr(module(source), source.name)
    return function


def module(source: Source) -> ModuleType:
    """The emitted package of a spec, imported under a name of its own."""
    entry = f"{source.name}_{_key(source)}"
    with _importing:
        return sys.modules.get(f"recgen_{entry}") or import_package(_generated(source, entry), f"recgen_{entry}")


def import_package(path: Path, name: str) -> ModuleType:
    """Import the package in the folder `path` as `name`, wherever it lies."""
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[os.fspath(path)])
    if spec is None or spec.loader is None:
        raise RecgenError(f"{path} is not a Python package")
    imported = importlib.util.module_from_spec(spec)
    sys.modules[name] = imported
    try:
        spec.loader.exec_module(imported)
    except BaseException:
        for partial in [loaded for loaded in sys.modules if loaded == name or loaded.startswith(f"{name}.")]:
            del sys.modules[partial]
        raise
    return imported


def location() -> Path:
    """RECGEN_CACHE, else recgen/ in XDG_CACHE_HOME, else ~/.cache/recgen."""
    if chosen := os.environ.get("RECGEN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recgen"


def _generated(source: Source, entry: str) -> Path:
    """The folder of the package in the cache, generated when it is not there."""
    place = location() / entry
    if not _is_there(place / source.name):
        # Imported here: SymPy and the formatter take longer than everything else, and a hit needs neither.
        from recgen.package import finish
        from recgen.pipeline import compile_spec

        (package,) = finish([(source, compile_spec(source).files)])
        _enter(package, place)
    return place / source.name


def _enter(package: Package, place: Path) -> None:
    """Put a package into the cache in one step; where another process was first, its entry stays."""
    from recgen.package import write

    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=place.parent) as staging:
            write(package, Path(staging) / "entry")
            os.rename(Path(staging) / "entry", place)
    except OSError as error:
        if not _is_there(place / package.name):
            raise RecgenError(f"cannot write to the cache {place}: {error.strerror}; RECGEN_CACHE chooses another folder") from None


def _is_there(package: Path) -> bool:
    return (package / "__init__.py").is_file()


def _key(source: Source) -> str:
    return hashlib.sha256(f"{_compiler()}\n{source.name}\n{source.text}".encode()).hexdigest()[:16]


@cache
def _compiler() -> str:
    """A digest of the compiler itself and of its templates."""
    digest = hashlib.sha256()
    for root, pattern in ((Path(__file__).parent, "*.py"), (folder("templates"), "**/*")):
        for path in sorted(path for path in root.glob(pattern) if path.is_file() and "__pycache__" not in path.parts):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
