"""microsteps: updates of the state -> canonical micro-steps.

The updates are cut into atoms, a decay or a set of rank-one writes each. Positions between atoms are where the state can be
read. Atoms are grouped greedily into micro-steps; the decays of a token are moved into one of them, which is legal where no
exponent becomes positive. Where no such grouping exists, every read is expanded down to the state at the start of the token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import sympy
from sympy import Expr, Mul, Pow, default_sort_key

from recgen.canonical import Placed, add_up, collect, fuse, monomials, strip
from recgen.elementwise import Input, axes_of, bounds, factors, reduce, sigmoid, softplus
from recgen.form import MicroStep, Read, Row, Update

ZERO, ONE = sympy.Integer(0), sympy.Integer(1)
MOST_EVENTS = 8
DecayAxis = Literal["none", "scalar", "key"]


class Obstacle(Exception):
    """Why there is no chunk form."""

    def __init__(self, why: str, line: int) -> None:
        super().__init__(why)
        self.line = line


@dataclass(frozen=True, slots=True)
class Write:
    """static write^T, or (S_position vector) write^T when vector is given."""

    static: Expr
    position: int
    vector: Expr | None
    write: Expr
    line: int


@dataclass(frozen=True, slots=True)
class Atom:
    """A decay (retention != 1, no writes) or writes (retention 1)."""

    retention: Expr
    writes: tuple[Write, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Query:
    """gain * (S_position vector) in the output."""

    position: int
    vector: Expr
    gain: Expr


@dataclass(frozen=True, slots=True)
class Flow:
    """One token as atoms, and what is read of it."""

    atoms: tuple[Atom, ...]
    queries: tuple[Query, ...]
    direct: Expr
    line: int  # of the output

    def decays(self, start: int, stop: int) -> tuple[int, ...]:
        """Which atoms from start on, before stop, are decays."""
        return tuple(i for i in range(start, stop) if not self.atoms[i].writes)

    def writes(self, start: int, stop: int) -> bool:
        """Whether anything is written from start on, before stop."""
        return any(a.writes for a in self.atoms[start:stop])

    def retention(self, atoms: Iterable[int]) -> Expr:
        """The product of the decays among these atoms."""
        return Mul(*(self.atoms[i].retention for i in atoms))


Canonical = tuple[tuple[MicroStep, ...], tuple[Read, ...], Expr]


def microsteps(updates: Sequence[Update], output: Row, line: int, inputs: tuple[Input, ...]) -> Canonical:
    """steps, reads and direct of the normal form; raises Obstacle."""
    flow = _flow(updates, output, line, inputs)
    bounds = _group(flow)
    plan = _arrange(flow, bounds) if bounds is not None else None
    if plan is None:
        flow = _expand(flow, inputs)
        plan = _arrange(flow, [0, len(flow.atoms)] if flow.atoms else [0])
        if plan is None:
            raise Obstacle("the decays of a token do not commute with its reads", line)
    return _finish(flow, plan, inputs)


# updates -> atoms


def _flow(updates: Sequence[Update], output: Row, line: int, inputs: tuple[Input, ...]) -> Flow:
    atoms: list[Atom] = []
    position = [0]  # of each version of the state
    for n, u in enumerate(updates):
        retention = _retention(u, n, inputs)
        if retention != 1:
            atoms.append(Atom(retention, (), u.line))
        writes: list[Write] = []
        for row, column in u.outers:
            if column.reads:
                raise Obstacle("the transition acts on the value side of the state", u.line)
            c, write = factors(column.static, "k", inputs)
            if row.static != 0:
                writes.append(Write(c * row.static, 0, None, write, u.line))
            for r in row.reads:
                if "v" in axes_of(r.gain, inputs):
                    raise Obstacle("a correction has a strength for each value channel", u.line)
                writes.append(Write(ZERO, position[r.version], c * r.gain * r.vector, write, u.line))
        if writes:
            atoms.append(Atom(ONE, tuple(writes), u.line))
        position.append(len(atoms))
    queries = []
    for r in output.reads:
        c, gain = factors(r.gain, "v", inputs)
        queries.append(Query(position[r.version], c * r.vector, gain))
    return _past_own_decay(Flow(tuple(atoms), tuple(queries), output.static, line))


def _past_own_decay(flow: Flow) -> Flow:
    """A read that carries the factor of the decay that follows it is a read behind that decay."""

    def past(position: int, vector: Expr) -> tuple[int, Expr]:
        while position < len(flow.atoms) and not flow.atoms[position].writes:
            rest = strip(vector, flow.atoms[position].retention)
            if rest is None:
                break
            position, vector = position + 1, rest
        return position, vector

    def write(w: Write) -> Write:
        if w.vector is None:
            return w
        position, vector = past(w.position, w.vector)
        return replace(w, position=position, vector=vector)

    atoms = tuple(replace(a, writes=tuple(write(w) for w in a.writes)) for a in flow.atoms)
    queries = [Query(*past(q.position, q.vector), q.gain) for q in flow.queries]
    return replace(flow, atoms=atoms, queries=tuple(queries))


def _retention(u: Update, version: int, inputs: tuple[Input, ...]) -> Expr:
    """The factor along the key axis by which the state is kept."""
    for k in u.keeps:
        if k.value != 1:
            raise Obstacle("the state decays for each value channel", u.line)
        if k.version != version:
            raise Obstacle("an older state is added to the state", u.line)
    if not u.keeps:
        raise Obstacle("the state before this line is dropped", u.line)
    retention = add_up([k.key for k in u.keeps])
    low, high = bounds(retention, inputs)
    if -math.inf < low < 0:
        raise Obstacle(f"the retention {retention} may be negative, down to {low:g}, and has no logarithm then", u.line)
    if low < 0 and high <= 0:
        raise Obstacle(f"the retention {retention} is never positive and has no logarithm", u.line)
    if retention.could_extract_minus_sign() and not retention.is_Add:
        raise Obstacle(f"the retention {retention} is negative and has no logarithm", u.line)
    return retention


# atoms -> groups


def _group(flow: Flow) -> list[int] | None:
    """Boundaries of the micro-steps, greedily as few as possible: in each, no read sees a write of the same micro-step."""
    bounds = [0]
    for p, atom in enumerate(flow.atoms):
        if not atom.writes:
            continue
        positions = [w.position for w in atom.writes if w.vector is not None]
        positions += [q.position for q in flow.queries if q.position <= p]
        late = [m for m in positions if flow.writes(bounds[-1], m)]
        if late:
            # Decays go with the writes behind them, so the boundary stands right behind the last write that is seen.
            bounds.append(1 + max(i for i in range(max(late)) if flow.atoms[i].writes))
    bounds = [*bounds, len(flow.atoms)] if flow.atoms else bounds
    return bounds if all(_is_one_step(flow, *span) for span in pairwise(bounds)) else None


def _is_one_step(flow: Flow, start: int, stop: int) -> bool:
    """Whether every write reads the state before all writes of the span, and the output sees all of them or none."""
    reads = [w.position for a in flow.atoms[start:stop] for w in a.writes if w.vector is not None]
    cut = [q.position for q in flow.queries if flow.writes(start, q.position) and flow.writes(max(start, q.position), stop)]
    return not cut and all(m >= start and not flow.writes(start, m) for m in reads)


@dataclass(frozen=True, slots=True)
class Group:
    """A micro-step before its events are fused."""

    retention: Expr
    writes: tuple[Placed, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A read of the output in its place."""

    query: Query
    step: int
    after: bool


Plan = tuple[tuple[Group, ...], tuple[Asked, ...]]


def _arrange(flow: Flow, bounds: list[int]) -> Plan | None:
    """The groups with all decays in one of them; None when every choice would need a positive exponent."""
    every = flow.decays(0, len(flow.atoms))
    spans = list(pairwise(bounds))
    if not every:
        return _place(flow, spans, None, every)
    order = sorted(range(len(spans)), key=lambda g: not flow.decays(*spans[g]))
    plans = (_place(flow, spans, g, every) for g in order)
    return next((p for p in plans if p is not None), None)


def _place(flow: Flow, spans: list[tuple[int, int]], at: int | None, every: tuple[int, ...]) -> Plan | None:
    """All decays in group `at`. A read or write that lacks some of them gets their product; one that has too many: None."""
    groups: list[Group] = []
    for g, (start, stop) in enumerate(spans):
        placed: list[Placed] = []
        for p in range(start, stop):
            for w in flow.atoms[p].writes:
                later = flow.decays(p, len(flow.atoms))
                if at is not None and g < at and later != every:
                    return None
                write_after = at is None or g > at or (g == at and later != every)
                vector, read_after = w.vector, write_after
                if w.vector is not None:
                    seen = flow.decays(0, w.position)
                    if at is not None and g > at and seen != every:
                        return None
                    read_after = at is None or g > at or (g == at and seen == every)
                    vector = w.vector * (ONE if read_after else flow.retention(seen))
                owed = flow.retention(later) if write_after else ONE
                row = w.static if vector is None else vector
                placed.append(Placed(row, vector is not None, w.write * owed, read_after, write_after, w.line))
        line = min(flow.atoms[p].line for p in range(start, stop))
        groups.append(Group(flow.retention(every) if g == at else ONE, tuple(placed), line))
    asked: list[Asked] = []
    for q in flow.queries:
        step = sum(flow.writes(*s) and flow.writes(s[0], q.position) for s in spans)
        seen = flow.decays(0, q.position)
        if at is None or (step >= at and seen == every):
            asked.append(Asked(q, step, True))
        elif step <= at or (step == at + 1 and not any(w.write_after for w in groups[at].writes)):
            asked.append(Asked(replace(q, vector=q.vector * flow.retention(seen)), step, False))
        else:
            return None
    return tuple(groups), tuple(asked)


# expansion


def _expand(flow: Flow, inputs: tuple[Input, ...]) -> Flow:
    """The same token with every read taken from the state at its start: one micro-step always suffices."""

    def base(position: int, vector: Expr) -> tuple[Expr, Expr]:
        """S_position vector = static + S_0 x."""
        static, x, extra = ZERO, vector, ZERO
        for p in reversed(range(position)):
            atom = flow.atoms[p]
            inner = x
            if not atom.writes:
                x = x * atom.retention
            for w in atom.writes:
                c = reduce("k", w.write * inner, inputs)
                if c == 0:
                    continue
                if w.vector is None:
                    static += c * w.static
                else:
                    s, y = base(w.position, w.vector)
                    static, extra = static + c * s, extra + c * y
        return static, x + extra

    atoms: list[Atom] = []
    for atom in flow.atoms:
        writes: list[Write] = []
        for w in atom.writes:
            if w.vector is None:
                writes.append(w)
                continue
            static, x = base(w.position, w.vector)
            writes += [replace(w, static=ZERO, position=0, vector=x)] + [replace(w, static=static, vector=None)] * (static != 0)
        atoms.append(replace(atom, writes=tuple(writes)))
    queries, direct = [], flow.direct
    for q in flow.queries:
        if q.position == len(flow.atoms):
            queries.append(q)
            continue
        static, x = base(q.position, q.vector)
        queries.append(Query(0, x, q.gain))
        direct += q.gain * static
    return Flow(tuple(atoms), tuple(queries), direct, flow.line)


# groups -> micro-steps


def _finish(flow: Flow, plan: Plan, inputs: tuple[Input, ...]) -> Canonical:
    groups, asked = plan
    steps = []
    for index, g in enumerate(groups):
        held = any(not a.after and a.step == index + 1 for a in asked)
        decay = log_of(g.retention)
        axis: DecayAxis = "none" if decay == 0 else "key" if "k" in axes_of(decay, inputs) else "scalar"
        events = fuse(g.writes, g.retention, axis, inputs, held=held)
        if len(events) > MOST_EVENTS:
            raise Obstacle(f"a token has {len(events)} rank-one writes that read the same state", g.line)
        steps.append(MicroStep(decay, axis, events, g.line))
    reads: dict[tuple[Expr, int, bool], list[Expr]] = {}
    for a in asked:
        step, after, vector = a.step, a.after, a.query.vector
        if not after and step < len(groups) and groups[step].retention != 1:
            stripped = strip(vector, groups[step].retention)
            vector, after = (vector, False) if stripped is None else (stripped, True)
        for c, gain in monomials(a.query.gain, "v", inputs):
            reads.setdefault((gain, step, after), []).append(c * vector)
    merged = [Read(collect(q, "k", inputs), gain, step, after, flow.line) for (gain, step, after), q in reads.items()]
    merged = [r for r in merged if r.query != 0]
    merged.sort(key=lambda r: (r.step, r.after_decay, default_sort_key(r.gain)))
    return tuple(steps), tuple(merged), collect([flow.direct], "v", inputs)


def log_of(retention: Expr) -> Expr:
    """log(retention): exponents add up, log(sigmoid(x)) = -softplus(-x) does not underflow."""
    logs, others = [], []
    for f in Mul.make_args(retention):
        if isinstance(f, sympy.exp):
            logs.append(f.args[0])
        elif isinstance(f, sigmoid):
            logs.append(-softplus(-f.args[0]))
        elif isinstance(f, Pow) and isinstance(f.base, sigmoid):
            logs.append(-f.exp * softplus(-f.base.args[0]))
        else:
            others.append(f)
    rest = Mul(*others)
    return sympy.Add(*logs) + (ZERO if rest == 1 else sympy.log(rest))
