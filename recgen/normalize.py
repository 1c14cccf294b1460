"""normalize: Spec -> NormalForm, the waist of the compiler. Nothing behind this file knows the zoo or a variant's name.

Two passes: the lines, worked by SymPy, become updates of the state (`updates`, `output`: what the spec says), and these
become canonical micro-steps (`steps`, `reads`, `direct`: what can be chunked), see microsteps.py.
"""

from __future__ import annotations

from typing import NoReturn

from sympy import Expr, Mul, exp

from recgen.affine import ONE, ZERO, Diag, Outer, Step, Term, execute
from recgen.elementwise import Axis, Domain, Input, axes_of, bounds, symbol
from recgen.errors import SpecError
from recgen.form import Column, Event, Keep, MicroStep, NormalForm, Read, Row, StateRead, Update
from recgen.microsteps import Obstacle, microsteps
from recgen.spec import Spec

__all__ = [
    "Axis",
    "Column",
    "Domain",
    "Event",
    "Input",
    "Keep",
    "MicroStep",
    "NormalForm",
    "Read",
    "Row",
    "StateRead",
    "Update",
    "normalize",
]


def normalize(spec: Spec) -> NormalForm:
    """The canonical form of a spec; raises SpecError where the recurrence has no update of rank one or diagonal terms."""
    trace = execute(spec)
    updates = tuple(_update(s, spec) for s in trace.steps)
    output = _output(trace.output, spec)
    steps: tuple[MicroStep, ...] = ()
    reads: tuple[Read, ...] = ()
    direct: Expr = ZERO
    obstacle: str | None = None
    obstacle_line: int | None = None
    try:
        steps, reads, direct = microsteps(updates, output, trace.output.line, spec.inputs)
    except Obstacle as e:
        obstacle, obstacle_line = str(e), e.line
    form = NormalForm(
        spec.name,
        spec.doc,
        spec.inputs,
        updates,
        output,
        trace.output.line,
        steps,
        reads,
        direct,
        obstacle,
        obstacle_line,
        spec.source,
    )
    form.verify()
    return form


def _fail(spec: Spec, at: Step, message: str, hint: str) -> NoReturn:
    source = spec.source.split("\n")[at.line - 1]
    raise SpecError(spec.path, at.line, at.col, message, hint=hint, source=source)


_NUMBER_HINT = "keep a read a row: v * ..., not dot(..., S @ k) * v; two matrices around S go on two lines"


def _update(step: Step, spec: Spec) -> Update:
    """One assignment of the state as keeps and outer products."""
    keeps: dict[tuple[int, Expr], Expr] = {}
    rows: dict[Expr, Row] = {}
    columns: list[tuple[Row, Column]] = []
    for t in step.value.terms:
        match t:
            case Term(left=Diag(d=x), version=int(n), flipped=False, right=Diag(d=y)):
                key, value = _sides(x, y, spec.inputs)
                keeps[n, value] = keeps.get((n, value), ZERO) + key
            case Term(left=Outer(a=a, b=b), version=None):
                rows[b] = _add(rows.get(b), Row(a, ()))
            case Term(left=Diag(d=x), version=int(n), flipped=False, right=Outer(a=a, b=b)):
                rows[b] = _add(rows.get(b), Row(ZERO, (StateRead(n, a, x),)))
            case Term(left=Outer(a=a, b=b), version=int(n), flipped=False, right=Diag(d=y)):
                columns.append((Row(a, ()), Column(ZERO, (StateRead(n, b, y),))))
            case _:
                _fail(spec, step, "the state is read down to a single number before it is written", _NUMBER_HINT)
    for (_, value), key in keeps.items():
        _check_decay(key * value, step, spec)
    kept = tuple(Keep(n, k, v) for (n, v), k in keeps.items() if k != 0)
    return Update(kept, (*((r, Column(b, ())) for b, r in rows.items()), *columns), step.line)


def _check_decay(retention: Expr, step: Step, spec: Spec) -> None:
    """Refuse a log decay without its exp, and one that is never below 0."""
    for f in Mul.make_args(retention):
        logs = [i.name for i in spec.inputs if i.domain.kind == "log_decay" and symbol(i.name) in f.free_symbols]
        if logs and f == symbol(logs[0]):
            hint = f"`{logs[0]}` is a log_decay, the log of what is kept: write exp({logs[0]})"
            _fail(spec, step, f"the state is multiplied by `{logs[0]}`, which is never positive", hint)
        if isinstance(f, exp) and f.free_symbols and bounds(f, spec.inputs)[0] >= 1:
            hint = f"the log of what is kept is at most 0: write {exp(-f.args[0])}"
            if logs:
                hint = f"`{logs[0]}` is a log_decay, <= 0 already: write exp({logs[0]})"
            _fail(spec, step, f"the state grows by `{f}`, which is never below 1", hint)


def _output(step: Step, spec: Spec) -> Row:
    """The output as a row that reads the state."""
    row = Row(ZERO, ())
    for t in step.value.terms:
        match t:
            case Term(left=Outer(a=a, b=b), version=None):
                row = _add(row, Row(a * b, ()))
            case Term(left=Diag(d=x), version=int(n), flipped=False, right=Outer(a=a, b=b)):
                row = _add(row, Row(ZERO, (StateRead(n, a * b, x),)))
            case _:
                _fail(spec, step, "the output mixes the channels of a read", "an output is a sum of gain * (S @ q) and value rows")
    return row


def _add(x: Row | None, y: Row) -> Row:
    """The sum of two rows; reads of the same state with the same gain add their vectors only in the canonical form."""
    return y if x is None else Row(x.static + y.static, x.reads + y.reads)


def _sides(left: Expr, right: Expr, inputs: tuple[Input, ...]) -> tuple[Expr, Expr]:
    """Diag(left) S Diag(right) as (key factor, value factor): scalars stand in the key factor."""
    scalars = [f for f in Mul.make_args(left) if "v" not in axes_of(f, inputs)]
    value = Mul(*(f for f in Mul.make_args(left) if "v" in axes_of(f, inputs)))
    return Mul(right, *scalars), value if value != 1 else ONE
