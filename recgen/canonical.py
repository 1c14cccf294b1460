"""canonical: one way to write each expression and each set of rank-one writes, so that equivalent specs come out equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import sympy
from sympy import Add, Expr, Mul, Pow, default_sort_key

from recgen.elementwise import Axis, Input, factors
from recgen.form import Event

ZERO, ONE = sympy.Integer(0), sympy.Integer(1)

Pair = tuple[Expr, Expr]  # (coefficient free of an axis, factor that varies along it)


# expressions


def monomials(expr: Expr, axis: Axis, inputs: Sequence[Input]) -> list[Pair]:
    """expr as a sum of c * x, c free of the axis and x a product that cannot be split along it."""
    if expr.is_Add:
        return [m for term in expr.args for m in monomials(term, axis, inputs)]
    c, x = factors(expr, axis, inputs)
    if any(f.is_Add or (isinstance(f, Pow) and f.base.is_Add and f.exp.is_Integer and f.exp > 0) for f in Mul.make_args(x)):
        return [(c * d, y) for term in Add.make_args(sympy.expand_mul(x, deep=False)) for d, y in monomials(term, axis, inputs)]
    return [] if c == 0 else [(c, x)]


def gather(pairs: Iterable[Pair]) -> list[Pair]:
    """The sum with one coefficient for each factor, without zeros, sorted."""
    by_factor: dict[Expr, list[Expr]] = {}
    for c, x in pairs:
        by_factor.setdefault(x, []).append(c)
    summed = ((add_up(c), x) for x, c in by_factor.items())
    return sorted(((c, x) for c, x in summed if c != 0), key=lambda p: default_sort_key(p[1]))


def add_up(terms: Sequence[Expr]) -> Expr:
    """The sum, with what all terms have in common taken out."""
    if len(terms) == 1:
        return terms[0]
    total = sympy.expand_mul(Add(*terms), deep=False)
    # Evaluated again, since gcd_terms leaves 2*(x + y) unevaluated.
    return Mul(*Mul.make_args(sympy.gcd_terms(total, clear=False, fraction=False))) if total.is_Add else total


def build(pairs: Sequence[Pair]) -> Expr:
    """The sum of c * x."""
    return add_up([c * x for c, x in pairs]) if pairs else ZERO


def collect(terms: Iterable[Expr], axis: Axis, inputs: Sequence[Input]) -> Expr:
    """The canonical sum of rows along an axis."""
    return build(gather(m for t in terms for m in monomials(t, axis, inputs)))


def strip(x: Expr, factor: Expr) -> Expr | None:
    """x / factor when every term of x carries the factor as it stands, else None."""
    for f in Mul.make_args(factor):
        rest = _strip_one(x, f)
        if rest is None:
            return None
        x = rest
    return x


def _strip_one(x: Expr, f: Expr) -> Expr | None:
    if x.is_Add and x != f:
        parts = [_strip_one(a, f) for a in x.args]
        return None if any(p is None for p in parts) else Add(*(p for p in parts if p is not None))
    args = list(Mul.make_args(x))
    for n, a in enumerate(args):
        rest: Expr | None = None
        if a == f:
            rest = ONE
        elif a == -f:
            rest = -ONE
        elif isinstance(f, sympy.exp) and isinstance(a, sympy.exp):
            have, need = a.args[0].as_coefficients_dict(), f.args[0].as_coefficients_dict()
            if all(have[t] * c > 0 and abs(have[t]) >= abs(c) for t, c in need.items()):
                rest = sympy.exp(a.args[0] - f.args[0])
        elif isinstance(a, Pow) and a.base == f and a.exp.is_number and a.exp >= 1:
            rest = Pow(f, a.exp - 1)
        elif a.is_Add:
            rest = _strip_one(a, f)
        if rest is not None:
            return Mul(*args[:n], rest, *args[n + 1 :])
    return None


def _common(coefficients: Sequence[Expr]) -> Expr:
    """The factors that all coefficients have, without sign."""
    split = [c.as_coeff_Mul() for c in coefficients]
    sizes = {abs(n) for n, _ in split}
    common = sizes.pop() if len(sizes) == 1 else ONE
    powers = [_powers(rest) for _, rest in split]
    shared = {f: _nearest([p.get(f, ZERO) for p in powers]) for f in powers[0]}
    return common * Mul(*(Pow(f, n) for f, n in shared.items()))


def _nearest(exponents: Sequence[Expr]) -> Expr:
    """The exponent that all share: of one sign, the one nearest to 0; of both, none."""
    if all(n > 0 for n in exponents):
        return min(exponents)
    return max(exponents) if all(n < 0 for n in exponents) else ZERO


def _powers(product: Expr) -> dict[Expr, Expr]:
    """The exponent of each base; 1 / |k| and 1 / |k|^2 are powers of one."""
    out: dict[Expr, Expr] = {}
    for f in Mul.make_args(product):
        base, n = (f.base, f.exp) if isinstance(f, Pow) and f.exp.is_Rational else (f, ONE)
        if base != 1:
            out[base] = out.get(base, ZERO) + n
    return out


# events


@dataclass(frozen=True, slots=True)
class Placed:
    """(row) write^T in a micro-step: a static row, or the read of the state with a key row."""

    row: Expr
    reads: bool
    write: Expr
    read_after: bool
    write_after: bool
    line: int


@dataclass(slots=True)
class _Bucket:
    """What is written along one factor."""

    static: list[Pair] = field(default_factory=list)
    before: list[Pair] = field(default_factory=list)  # reads of the state before the decay
    after: list[Pair] = field(default_factory=list)
    line: int = 0


def fuse(
    placed: Sequence[Placed], retention: Expr, axis: Literal["none", "scalar", "key"], inputs: Sequence[Input], *, held: bool = False
) -> tuple[Event, ...]:
    """Few events: what shares a write adds its rows, what shares a row adds its writes.

    held: the output reads the state between these events and their decay, so none may be written behind the decay.
    """
    parts = [q for p in placed for q in _split(p, inputs)]
    if axis == "scalar":
        parts = _by_power(parts, retention, held)
    elif axis == "key":
        parts = [_own_decay(q, retention, inputs) for q in parts]
    buckets: dict[tuple[Expr, bool], _Bucket] = {}
    for q in parts:
        bucket = buckets.setdefault((q.write, q.write_after), _Bucket(line=q.line))
        kind = bucket.static if not q.reads else bucket.after if q.read_after else bucket.before
        kind.append((q.c, q.row))
        bucket.line = min(bucket.line, q.line)
    events = [e for (write, after), b in buckets.items() if (e := _event(write, after, b, retention, inputs)) is not None]
    fused = _by_row(events, inputs)
    return tuple(sorted(fused, key=_event_key))


@dataclass(frozen=True, slots=True)
class _Part:
    """c * (row) write^T, with every scalar factor in c."""

    c: Expr
    row: Expr
    reads: bool
    write: Expr
    read_after: bool
    write_after: bool
    line: int


def _split(p: Placed, inputs: Sequence[Input]) -> list[_Part]:
    rows = monomials(p.row, "k" if p.reads else "v", inputs)
    writes = monomials(p.write, "k", inputs)
    return [_Part(c * d, x, p.reads, y, p.read_after, p.write_after, p.line) for c, x in rows for d, y in writes]


def _own_decay(q: _Part, retention: Expr, inputs: Sequence[Input]) -> _Part:
    """A decay per channel that a row carries as a factor becomes a flag."""
    if q.reads and not q.read_after and (x := strip(q.c * q.row, retention)) is not None:
        c, row = factors(x, "k", inputs)
        q = replace(q, c=c, row=row, read_after=True)
    if q.write_after and (y := strip(q.c * q.write, retention)) is not None:
        c, write = factors(y, "k", inputs)
        q = replace(q, c=c, write=write, write_after=False)
    return q


def _by_power(parts: Sequence[_Part], retention: Expr, held: bool) -> list[_Part]:
    """A scalar decay commutes, so only its power counts: where it stands is chosen so that reads meet the static row they fuse with."""
    powers: list[tuple[_Part, int]] = []
    for q in parts:
        power, c = int(q.reads and q.read_after) + int(not q.write_after), q.c
        while power < 1 + q.reads and (rest := strip(c, retention)) is not None:
            power, c = power + 1, rest
        powers.append((replace(q, c=c), power))
    late = {q.write for q, n in powers if not q.reads and n == 0}
    early = {q.write for q, n in powers if not q.reads and n == 1} - late
    out = []
    for q, n in powers:
        if not q.reads:
            out.append(replace(q, read_after=n == 0, write_after=n == 0))
        elif n == 1:
            late_enough = q.write not in early and not held
            out.append(replace(q, read_after=late_enough, write_after=late_enough))
        else:
            out.append(replace(q, read_after=n == 2, write_after=n == 0))
    return out


def _event(write: Expr, write_after: bool, b: _Bucket, retention: Expr, inputs: Sequence[Input]) -> Event | None:
    """The event of a bucket, with common scalar factors in its write."""
    read_after, reads = bool(b.after), b.after or b.before
    if b.before and b.after:
        late = [m for c, x in b.after for m in monomials(c * x * retention, "k", inputs)]
        read_after, reads = False, b.before + late
    static, vector = gather(b.static), gather(reads)
    if not static and not vector:
        return None
    common = _common([c for c, _ in static + vector])
    nu = build([(c / common, x) for c, x in static])
    a = build([(c / common, x) for c, x in vector]) if vector else None
    return Event(nu, a, common * write, read_after if vector else write_after, write_after, b.line)


def _by_row(events: Sequence[Event], inputs: Sequence[Input]) -> list[Event]:
    """Events with the same row, up to sign, add their writes."""
    groups: dict[tuple[Expr, Expr | None, bool, bool], list[tuple[Event, Expr]]] = {}
    for e in events:
        first = e.static if e.static != 0 else e.read
        sign = -ONE if first is not None and first.could_extract_minus_sign() else ONE
        row = (sign * e.static, None if e.read is None else sign * e.read, e.read_after, e.write_after)
        groups.setdefault(row, []).append((e, sign))
    out = []
    for (static, read, read_after, write_after), members in groups.items():
        if len(members) == 1:
            out.append(members[0][0])
            continue
        write = collect([s * e.write for e, s in members], "k", inputs)
        if write.could_extract_minus_sign():
            write, static, read = -write, -static, None if read is None else -read
        out.append(Event(static, read, write, read_after, write_after, min(e.line for e, _ in members)))
    return out


def _event_key(e: Event) -> tuple[object, ...]:
    read = ZERO if e.read is None else e.read
    return (*(default_sort_key(x) for x in (e.write, e.static, read)), e.read_after, e.write_after)
