"""prove: a proof in SymPy that the equations of a chunk are the recurrence, unrolled.

Every input element is a symbol; what is not a polynomial in them (exp of a gate, a softplus, a norm) becomes a symbol too, the same one
wherever it occurs, and exp(a + b) the product of two. Both sides are then polynomials over the rationals, and equality is decided exactly.
The rows of the state do not depend on each other: one value channel is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import sympy
from sympy import QQ, Add, Expr, Mul, Pow, Symbol

from recgen.chunk import ChunkForm, Reader, Writer
from recgen.elementwise import SIZES, sum_k, sum_v
from recgen.errors import VerifyError
from recgen.form import Event, NormalForm, Row, StateRead

Poly = Any  # an element of a sparse polynomial ring over QQ
Vector = list[Poly]
Matrix = list[Vector]  # the state: [V][K]


def prove(form: ChunkForm, tokens: int = 3, keys: int = 2) -> None:
    """Raises VerifyError with the difference where the chunk equations are not the micro-steps of the normal form, token after token."""
    rows = _rows(form.normal, tokens, keys)
    _compare(form.normal.name, "the chunk form", _chunk(form, rows), _micro_steps(form.normal, rows))


def prove_micro_steps(normal: NormalForm, tokens: int = 2, keys: int = 2) -> None:
    """Raises VerifyError with the difference where the micro-steps are not what the spec says line by line."""
    rows = _rows(normal, tokens, keys)
    _compare(normal.name, "the normal form", _micro_steps(normal, rows), _updates(normal, rows))


@dataclass(frozen=True, slots=True)
class _Result:
    """The output [T][V] and the state at the end."""

    output: list[Vector]
    state: Matrix


def _compare(name: str, what: str, found: _Result, wanted: _Result) -> None:
    for part, ours, theirs in (("o", found.output, wanted.output), ("S", found.state, wanted.state)):
        for n, (row, other) in enumerate(zip(ours, theirs, strict=True)):
            for m, (x, y) in enumerate(zip(row, other, strict=True)):
                if x != y:
                    difference = str(sympy.factor_terms((x - y).as_expr()))
                    raise VerifyError(f"{name}: {what} is not the recurrence: {part}[{n},{m}] differs by {difference[:500]}")


@dataclass(slots=True)
class _Rows:
    """The rows of a form at each token, as polynomials in the elements of the inputs."""

    normal: NormalForm
    tokens: int
    keys: int
    values: int = 1
    fresh: dict[Expr, Symbol] = field(default_factory=dict)
    elements: dict[tuple[Expr, int, int, int], Expr] = field(default_factory=dict)
    ring: Any = None

    # expressions of elements

    def element(self, expr: Expr, t: int, k: int, v: int) -> Expr:
        """expr at one token and channel, polynomial in symbols."""
        key = (expr, t, k, v)
        if key not in self.elements:
            self.elements[key] = self._element(expr, t, k, v)
        return self.elements[key]

    def _element(self, expr: Expr, t: int, k: int, v: int) -> Expr:
        if isinstance(expr, Symbol):
            return self._symbol(expr, t, k, v)
        if expr.is_Rational:
            return expr
        if isinstance(expr, sum_k):
            return Add(*(self.element(expr.args[0], t, n, v) for n in range(self.keys)))
        if isinstance(expr, sum_v):
            return Add(*(self.element(expr.args[0], t, k, n) for n in range(self.values)))
        args = [self.element(a, t, k, v) for a in expr.args]
        if isinstance(expr, Add | Mul):
            return expr.func(*args)
        if isinstance(expr, Pow) and expr.exp.is_Integer and expr.exp > 0:
            return args[0] ** expr.exp
        if isinstance(expr, sympy.exp):
            return Mul(*(self._exp(term) for term in Add.make_args(sympy.expand(args[0]))))
        return self._opaque(expr.func(*args))

    def _exp(self, term: Expr) -> Expr:
        """exp of one term: a whole multiple of what is in it is a power of its exponential."""
        count, base = term.as_coeff_Mul()
        if count.is_Integer and count > 1:
            return self._opaque(sympy.exp(base)) ** count
        return self._opaque(sympy.exp(term))

    def _opaque(self, value: Expr) -> Expr:
        if value.is_Rational or value.is_Symbol:
            return value
        return self.fresh.setdefault(value, Symbol(f"f{len(self.fresh)}", real=True))

    def _symbol(self, symbol: Symbol, t: int, k: int, v: int) -> Expr:
        if symbol.name in SIZES:
            return sympy.Integer({"K": self.keys, "V": self.values}[symbol.name])
        axes = next(i.axes for i in self.normal.inputs if i.name == symbol.name)
        index = "".join(f"_{n}" for a, n in (("t", t), ("k", k), ("v", v)) if a in (axes or ()))
        return Symbol(f"{symbol.name}{index}", real=True)

    # rows of polynomials

    def poly(self, expr: Expr) -> Poly:
        return self.ring.from_expr(sympy.expand(expr))

    def key(self, expr: Expr, t: int) -> Vector:
        return [self.poly(self.element(expr, t, k, 0)) for k in range(self.keys)]

    def value(self, expr: Expr, t: int) -> Vector:
        return [self.poly(self.element(expr, t, 0, v)) for v in range(self.values)]

    def decay(self, expr: Expr, t: int) -> Vector:
        """exp of a log decay."""
        return self.key(sympy.exp(expr), t)

    def start(self) -> Matrix:
        return [[self.poly(Symbol(f"S0_{v}_{k}", real=True)) for k in range(self.keys)] for v in range(self.values)]


def _rows(normal: NormalForm, tokens: int, keys: int) -> _Rows:
    """With a ring that has every symbol of every expression of the form."""
    rows = _Rows(normal, tokens, keys)
    expressions = [*_every(normal), *(sympy.exp(s.decay) for s in normal.steps)]
    for expr, t, k, v in product(expressions, range(tokens), range(keys), range(rows.values)):
        rows.element(expr, t, k, v)
    names = {s for e in rows.elements.values() for s in e.free_symbols}
    names |= {Symbol(f"S0_{v}_{k}", real=True) for v in range(rows.values) for k in range(keys)}
    rows.ring = sympy.ring(sorted(names, key=lambda s: s.name), QQ)[0]
    return rows


def _every(normal: NormalForm) -> Iterator[Expr]:
    """Every expression of a form but its decays."""
    for step in normal.steps:
        for e in step.events:
            yield from (e.static, e.write, *([] if e.read is None else [e.read]))
    yield from (x for r in normal.reads for x in (r.query, r.gain))
    yield normal.direct
    for u in normal.updates:
        yield from (x for keep in u.keeps for x in (keep.key, keep.value))
        for row, column in u.outers:
            yield from (row.static, column.static, *(x for r in (*row.reads, *column.reads) for x in (r.vector, r.gain)))
    yield from (normal.output.static, *(x for r in normal.output.reads for x in (r.vector, r.gain)))


# linear algebra on lists


def _dot(x: Vector, y: Vector) -> Poly:
    return sum((a * b for a, b in zip(x, y, strict=True)), start=0 * x[0])


def _read(S: Matrix, key: Vector) -> Vector:
    return [_dot(row, key) for row in S]


def _times(x: Vector, y: Vector) -> Vector:
    return [a * b for a, b in zip(x, y, strict=True)]


def _plus(*vectors: Vector) -> Vector:
    return [sum(entries[1:], start=entries[0]) for entries in zip(*vectors, strict=True)]


def _kept(S: Matrix, decay: Vector) -> Matrix:
    return [_times(row, decay) for row in S]


def _added(S: Matrix, outers: Iterable[tuple[Vector, Vector]]) -> Matrix:
    for row, key in outers:
        S = [_plus(s, [x * y for y in key]) for s, x in zip(S, row, strict=True)]
    return S


# the recurrence, token after token


def _micro_steps(normal: NormalForm, rows: _Rows) -> _Result:
    S, output = rows.start(), list[Vector]()
    for t in range(rows.tokens):
        seen: dict[tuple[int, bool], Matrix] = {}
        decayed = all(s.decay_axis == "none" for s in normal.steps)
        for n, step in enumerate(normal.steps):
            seen[n, decayed] = S
            if step.decay_axis == "none":
                S = _added(S, [_write(e, S, rows, t) for e in step.events])
                continue
            decay = rows.decay(step.decay, t)
            after = _kept(S, decay)
            before = _added(S, [_write(e, after if e.read_after else S, rows, t) for e in step.events if not e.write_after])
            seen[n, True], seen[n + 1, False] = after, before
            S = _added(_kept(before, decay), [_write(e, after if e.read_after else S, rows, t) for e in step.events if e.write_after])
            decayed = True
        seen[len(normal.steps), decayed] = S
        o = rows.value(normal.direct, t)
        for r in normal.reads:
            o = _plus(o, _times(rows.value(r.gain, t), _read(seen[r.step, r.after_decay], rows.key(r.query, t))))
        output.append(o)
    return _Result(output, S)


def _write(e: Event, S: Matrix, rows: _Rows, t: int) -> tuple[Vector, Vector]:
    row = rows.value(e.static, t)
    return (row if e.read is None else _plus(row, _read(S, rows.key(e.read, t)))), rows.key(e.write, t)


def _updates(normal: NormalForm, rows: _Rows) -> _Result:
    """Line by line, as NormalForm.run_updates."""
    S, output = rows.start(), list[Vector]()
    for t in range(rows.tokens):
        versions = [S]
        for u in normal.updates:
            new = [[0 * x for x in row] for row in S]
            for keep in u.keeps:
                kept = _kept(versions[keep.version], rows.key(keep.key, t))
                new = [_plus(n, [x * g for x in row]) for n, row, g in zip(new, kept, rows.value(keep.value, t), strict=True)]
            for row, column in u.outers:
                new = _added(new, [(_row(row, versions, rows, t), _column(column.static, column.reads, versions, rows, t))])
            versions.append(new)
        output.append(_row(normal.output, versions, rows, t))
        S = versions[-1]
    return _Result(output, S)


def _row(x: Row, versions: list[Matrix], rows: _Rows, t: int) -> Vector:
    reads = [_times(rows.value(r.gain, t), _read(versions[r.version], rows.key(r.vector, t))) for r in x.reads]
    return _plus(rows.value(x.static, t), *reads)


def _column(static: Expr, reads: Sequence[StateRead], versions: list[Matrix], rows: _Rows, t: int) -> Vector:
    total = rows.key(static, t)
    for r in reads:
        across = [_dot(list(channel), rows.value(r.vector, t)) for channel in zip(*versions[r.version], strict=True)]
        total = _plus(total, _times(rows.key(r.gain, t), across))
    return total


# the chunk


def _chunk(form: ChunkForm, rows: _Rows) -> _Result:
    """The chunk equations, the triangular system by substitution token after token, step after step within a token."""
    S0, T = rows.start(), rows.tokens
    static = {e.name: [rows.value(e.static, t) for t in range(T)] for e in form.events}
    values: dict[str, dict[int, Vector]] = {w.name: dict(enumerate(static[w.name])) for w in form.writes}
    values |= {c.name: {} for c in form.corrections}

    def seen(reader: Reader, i: int) -> Vector:
        """S0 and every write that the reader sees, against it."""
        total = _read(S0, _times(_span(form, rows, 0, i + reader.after), rows.key(reader.vector, i)))
        for e in form.events:
            for j in range(i + (e.writer.seen_by(reader) == "causal")):
                if j not in values[e.name]:
                    raise VerifyError(f"{form.normal.name}: {reader.name} reads {e.name} of its own token before it is known")
                score = _score(form, rows, reader, i, e.writer, j)
                total = _plus(total, [score * x for x in values[e.name][j]])
        return total

    for i in range(T):
        for c in sorted(form.corrections, key=lambda c: c.reader.step):
            values[c.name][i] = _plus(static[c.name][i], seen(c.reader, i))
    output = []
    for i in range(T):
        reads = [_times(rows.value(o.gain, i), seen(o.reader, i)) for o in form.outputs]
        output.append(_plus(rows.value(form.direct, i), *reads))
    S1 = _kept(S0, _span(form, rows, 0, T))
    for e in form.events:
        keys = [_times(_span(form, rows, j + e.writer.after, T), rows.key(e.writer.vector, j)) for j in range(T)]
        S1 = _added(S1, [(values[e.name][j], key) for j, key in enumerate(keys)])
    return _Result(output, S1)


def _score(form: ChunkForm, rows: _Rows, reader: Reader, i: int, writer: Writer, j: int) -> Poly:
    decay = _span(form, rows, j + writer.after, i + reader.after)
    return _dot(_times(rows.key(reader.vector, i), decay), rows.key(writer.vector, j))


def _span(form: ChunkForm, rows: _Rows, first: int, end: int) -> Vector:
    """What is kept from token `first` until before token `end`, by key channel; a span of less than no tokens is a positive exponent."""
    if first > end:
        raise VerifyError(f"{form.normal.name}: a positive exponent: from token {first} back to token {end}")
    result = [rows.ring.one] * rows.keys
    for t in range(first, end):
        result = _times(result, rows.decay(form.decay, t))
    return result
