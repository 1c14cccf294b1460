"""The command `recgen`. What it does is elsewhere; here are only arguments, messages and exit codes.

Exit code 0: done. 1: a spec is wrong, or `check` found a difference; nothing half-made is left. 2: the command line is wrong.
"""

from __future__ import annotations

import keyword
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

import recgen
from recgen import reserved
from recgen.errors import RecgenError, SpecError, VerifyError
from recgen.resources import SUFFIX, Source, find, folder, read_all, specs_folder

if TYPE_CHECKING:
    from recgen.normalize import NormalForm
    from recgen.package import Package
    from recgen.pipeline import Compiled

app = typer.Typer(
    name="recgen",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "From the equation of a linear recurrence to Triton kernels, forward and backward.\n\n"
        "A spec says what one token does to the state S, as a paper prints it:  [cyan]recgen new NAME[/] starts one, "
        "[cyan]recgen explain NAME[/] shows the derivation, [cyan]recgen generate NAME[/] writes the package."
    ),
)

Specs = Annotated[list[str] | None, typer.Argument(metavar="SPEC", help="Names of the zoo or paths of .rec files. None: all of specs/.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder that holds the packages: DIR/<name>/.")]
GENERATED = Path("generated")


class StageName(StrEnum):
    """What `explain` can show. The last of them is the plan of kernels; the files themselves are what `generate` writes."""

    normal = "normal"
    chunk = "chunk"
    tile = "tile"
    schedule = "schedule"


TITLES = {
    StageName.normal: "normal form: what one token does",
    StageName.chunk: "chunk form: the same over a chunk of tokens",
    StageName.tile: "tile graph: forward and derived backward",
    StageName.schedule: "schedule: kernels, and what they cost",
}

STARTER = '''"""{title}: say here in one sentence what one token does to the state.

Authors: Title of the paper, venue and year.
"""
# Inputs, by axis: key [B,T,H,K], value [B,T,H,V], scalar [B,T,H]; head is a parameter [H], head[key] one [H,K].
# In brackets, where the values lie: log_decay (<= 0), unit (0 to 1), unit_norm, or an interval such as scalar[0, 2], scalar[0, inf];
# with the axis of a parameter: head[key, log_decay].
q: key
k: key[unit_norm]
v: value
g: scalar[log_decay]
beta: scalar[unit]
scale: const = K ** -0.5

# One token, line by line. S is the state, value x key; a line reads the state as it stands at that line.
S = exp(g) * S                # forget
e = beta * (v - S @ k)        # predict, correct
S = S + e @ k.T               # write
o = scale * (S @ q)           # read
'''


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake becomes a message and exit code 1, a fault of recgen stays a traceback."""
    try:
        app(args=arguments, prog_name="recgen")
    except VerifyError:
        raise
    except (RecgenError, OSError) as error:
        sys.exit(_complain(error))


def _complain(error: RecgenError | OSError) -> int:
    """Print an error where errors go. A spec's error is printed as it is: it has its place, its line and its caret."""
    match error:
        case SpecError():
            text = str(error)
        case OSError(strerror=str(reason), filename=name):
            text = f"recgen: error: {name}: {reason}" if name else f"recgen: error: {reason}"
        case _:
            text = f"recgen: error: {error}"
    print(text, file=sys.stderr)
    return 1


def _version(wanted: bool) -> None:
    if wanted:
        print(f"recgen {recgen.__version__}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The name of the op, its package and its spec.")],
    into: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Where to put it. Default: specs/ where there is one, else here.")
    ] = None,
) -> None:
    """Write a commented spec to start from."""
    place = into or (Path("specs") if Path("specs").is_dir() else Path())
    path = place / f"{name}{SUFFIX}"
    _check_name(name, into)
    place.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTER.format(title=name.replace("_", " ").capitalize()))
    except FileExistsError:
        raise RecgenError(f"{path} exists; it is left as it is") from None
    print(f"{path}\nnext: recgen explain {path}, recgen generate {path}")


def _check_name(name: str, into: Path | None) -> None:
    """Refuse what cannot be the name of a spec, before anything is written."""
    if not name.isidentifier() or keyword.iskeyword(name):
        given = Path(name.removesuffix(SUFFIX))
        plain = re.sub(r"\W", "_", given.name)
        what = "a name is an identifier"
        if given.parent != Path():
            what, into = f"{what}, and --dir chooses the folder", (into or Path()) / given.parent
        command = ["recgen", "new", plain if plain.isidentifier() and not keyword.iskeyword(plain) else "my_rule"]
        raise RecgenError(f"{name!r} is no name for a spec: {what}: {shlex.join([*command, *(['--dir', str(into)] if into else [])])}")
    if (reason := reserved.why(name, an_input=True)) is not None:
        raise RecgenError(f"{name!r} is no name for a spec: {reason}")


@app.command()
def generate(specs: Specs = None, out: Out = GENERATED) -> None:
    """Write the package of each spec: kernels, references, parity tests.

    A package is written whole or not at all; a spec that is wrong leaves the others alone.
    """
    from recgen.package import write

    packages, seconds, notes, failed = _packages(_sources(specs))
    table = Table("package", "from", "files", "lines", "seconds", "", box=None, pad_edge=False)
    for package in packages:
        changed = write(package, out)
        took = f"{seconds[package.name]:.1f}"
        written = "written" if changed else "unchanged"
        table.add_row(str(out / package.name), package.source.path, str(len(package.files)), str(package.lines), took, written)
    if packages:
        _console().print(table)
    for note in notes:
        print(f"recgen: note: {note}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


@app.command()
def check(specs: Specs = None, out: Out = GENERATED) -> None:
    """Exit 1 with a diff when generated/ is not what specs and templates produce."""
    from recgen.package import compare, is_generated

    packages, _, _, failed = _packages(_sources(specs))
    diff = "".join(compare(package, out) for package in packages)
    if not specs and not failed and out.is_dir():
        known = {package.name for package in packages}
        strangers = [path for path in sorted(out.iterdir()) if path.is_dir() and path.name not in known and is_generated(path)]
        diff += "".join(f"{path}: stale, no spec of that name\n" for path in strangers)
    sys.stdout.write(diff)
    if diff:
        print(f"recgen: {out} is not what the specs produce: run recgen generate", file=sys.stderr)
    if diff or failed:
        raise typer.Exit(1)
    print(f"{len(packages)} packages in {out} are what their specs produce")


@app.command()
def explain(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A name of the zoo or the path of a .rec file.")],
    stage: Annotated[StageName | None, typer.Option(help="Only this stage.")] = None,
) -> None:
    """Print the derivation of a spec, stage by stage."""
    from recgen.pipeline import compile_spec

    compiled = compile_spec(find(spec, specs_folder()), (stage or StageName.schedule).value)
    shown = {
        StageName.normal: compiled.normal,
        StageName.chunk: compiled.chunk,
        StageName.tile: compiled.tile,
        StageName.schedule: compiled.schedule,
    }
    if stage is not None:
        print(shown[stage] or f"{compiled.source.name} has no chunk form: {compiled.normal.obstacle}")
        return
    for name, value in shown.items():
        if value is not None:
            print(f"{TITLES[name]}\n{'=' * len(TITLES[name])}\n\n{value}\n")
    if compiled.normal.obstacle is not None:
        print("Without a chunk form there are no further stages; the recurrent kernels and the references are made from the normal form.")


@app.command("list")
def list_specs() -> None:
    """Print the zoo: name, transition, whether it has a chunk form, and where it is from."""
    from recgen.pipeline import waist

    table = Table("name", "transition", "chunk form", "from", box=None, pad_edge=False)
    for source in read_all(folder("specs")):
        normal = waist(source)[1]
        table.add_row(source.name, transition(normal), "no" if normal.obstacle else "yes", paper(normal.doc))
    _console().print(table)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure emitted ops on this machine, against peers that are installed (recgen bench --help)."""
    from recgen.bench import app as bench_app

    bench_app(args=context.args, prog_name="recgen bench")


def transition(normal: NormalForm) -> str:
    """The class of a recurrence's transition, as the algebra found it."""
    if normal.obstacle is not None:
        return "general linear"
    axes = {step.decay_axis for step in normal.steps}
    decay = "diagonal" if "key" in axes else "scalar" if "scalar" in axes else "identity"
    corrections = sum(event.read is not None for step in normal.steps for event in step.events)
    return decay if not corrections else f"{decay} + rank {corrections}"


def paper(doc: str) -> str:
    """The citation in a spec's docstring: its last paragraph on one line, as far as the last sentence that ends in a year."""
    paragraphs = [" ".join(part.split()) for part in doc.strip().split("\n\n")]
    if len(paragraphs) < 2:
        return ""
    cited = re.match(r".*\b(19|20)\d\d\.(?=\s|$)", paragraphs[-1])
    return cited.group() if cited else paragraphs[-1]


def _sources(specs: Sequence[str] | None) -> tuple[Source, ...]:
    place = specs_folder()
    sources = tuple(find(spec, place) for spec in specs) if specs else read_all(place)
    names = [source.name for source in sources]
    for source in sources:
        if names.count(source.name) > 1:
            raise RecgenError(f"two specs are named {source.name}: " + ", ".join(s.path for s in sources if s.name == source.name))
    return sources


def _packages(sources: Sequence[Source]) -> tuple[tuple[Package, ...], dict[str, float], list[str], bool]:
    """Compile each spec and format all of them at once: packages, seconds, notes for the user. What is wrong is reported."""
    from recgen.package import finish
    from recgen.pipeline import compile_spec

    emitted: list[tuple[Source, dict[str, str]]] = []
    seconds: dict[str, float] = {}
    notes: list[str] = []
    for source in sources:
        start = time.perf_counter()
        try:
            compiled = compile_spec(source)
            emitted.append((source, compiled.files))
            notes += _notes(compiled)
        except VerifyError:
            raise
        except RecgenError as error:
            _complain(error)
        seconds[source.name] = time.perf_counter() - start
    return finish(emitted), seconds, notes, len(emitted) < len(sources)


def _notes(compiled: Compiled) -> Iterator[str]:
    """What a user should know of a package that is right as far as it goes."""
    name, form = compiled.source.name, compiled.chunk
    if compiled.normal.obstacle is not None:
        yield f"{name} has recurrent kernels and no chunked ones: {compiled.normal.obstacle}"
    if form is not None and not form.decays:
        import sympy  # which is loaded by then

        yield (
            f"{name} keeps {sympy.exp(form.decay)} of the state at each token, and nothing declares that this is at most 1. If it is, "
            "whatever you give it, there is nothing to do; else declare a domain ([log_decay], [unit]), or pass raw values through "
            "exp(-softplus(x))"
        )


def _console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut for the program that reads it."""
    return Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=1000, highlight=False)
