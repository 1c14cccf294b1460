"""What the tests share: a cache of their own, a fresh Python to run things in, and a compiler of one line to stand in for the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import settings

from recgen.errors import SpecError, VerifyError
from recgen.resources import Source, folder

ROOT = Path(__file__).resolve().parent.parent
ZOO = tuple(path.stem for path in sorted(folder("specs").glob("*.rec")))

# A run in CI draws the same examples every time, and no run fails because the machine was busy.
settings.register_profile("recgen", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("recgen")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Everything that is loaded in a run goes to one cache, which all workers share."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECGEN_CACHE", str(shared / "recgen-cache"))
        yield


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python() -> RunPython:
    """Run `python ARGUMENTS` in a fresh process at the root of the repository; keywords are environment variables.

    TRITON_INTERPRET must be set before Triton is imported, so what runs in the interpreter runs in a process of its own.
    """

    def run(*arguments: str, cwd: Path = ROOT, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {"PYTHONPATH": path} | {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
        done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            pytest.fail(f"python {' '.join(arguments)} exited with {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
        return done

    return run


class _Form(str):
    """What `explain` prints of a chunk form, and what `generate` asks of one."""

    decay = "a"
    decays = True


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put a compiler of one line in the place of recgen.pipeline: what a test of files and messages needs of one."""

    def compile_spec(source: Source, last: str = "files") -> SimpleNamespace:
        if "wrong" in source.text:
            raise SpecError(source.path, 1, 3, "wrong is wrong", hint="right", source="q wrong")
        if "faulty" in source.text:
            raise VerifyError("a stage went wrong")
        obstacle = "it has none" if "obstacle" in source.text else None
        shown = None if obstacle else f"of {source.name}"
        module = f"from .helper import twice\ndef {source.name}( x ) :\n  return twice(x)\n"
        files = {"helper.py": "def twice(x): return 2*x\n", "__init__.py": module, "NOTES.md": source.text}
        form = None if shown is None else _Form(shown)
        compiled = SimpleNamespace(source=source, normal=waist(source)[1], chunk=form, tile=shown, schedule=shown, files=files)
        later = ("normal", "chunk", "tile", "schedule", "files")
        for stage in later[later.index(last) + 1 :]:
            setattr(compiled, stage, None)
        return compiled

    def waist(source: Source) -> tuple[None, SimpleNamespace]:
        event = SimpleNamespace(read=1)
        step = SimpleNamespace(decay_axis="key", events=(event, SimpleNamespace(read=None)))
        obstacle = "it has none" if "obstacle" in source.text else None
        return None, SimpleNamespace(steps=(step,), obstacle=obstacle, doc="What it does.\n\nAuthors: Title,\n  2025.")

    module = ModuleType("recgen.pipeline")
    module.compile_spec = compile_spec  # type: ignore[attr-defined]
    module.waist = waist  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "recgen.pipeline", module)
    return module
