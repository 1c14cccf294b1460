"""statements: the lines of one kernel: which are written into others, in which order the rest stands. Part of emit.

`lower` makes statements on demand, each in a scope and with references to others; here they become text.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .schedule import Kernel

if TYPE_CHECKING:
    from .lower import Lowering

# Scopes of a scan: 0 before its loop, 1 the body. Of a parallel kernel: SCOPES * l behind l loops over key tiles (0: before any), and from
# there on the parts of the next loop's body: up to its loop over the levels of a steep chunk, if it has one, that loop's body, the rest.
SCOPES, BODY, EACH_LEVEL, BEHIND = 4, 1, 2, 3
REFERENCE = re.compile(r"§(\d+)§")


@dataclass(slots=True)
class Statement:
    """`name = text`; text refers to other statements as §index§. plain: may be written into its only user."""

    index: int
    name: str
    text: str
    scope: int
    plain: bool
    comment: str
    binary: bool = False
    lines: tuple[str, ...] = ()  # instead of an assignment: whole lines, with the same references
    rank: int = 0  # statements of a scope stand in this order where their references allow it
    ends: bool = False  # ... and of one rank first those that a product's tile is over with

    def references(self) -> list[int]:
        return [int(index) for index in REFERENCE.findall(" ".join((self.text, *self.lines)))]


@dataclass(frozen=True, slots=True)
class Loop:
    """A pass over the key channels or over the levels of a chunk: what it adds up in, its body with perhaps a loop inside, and what stands
    behind it."""

    start: tuple[str, ...]
    body: tuple[str, ...]
    inner: Loop | None
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The text of one kernel, ready for the template."""

    kernel: Kernel
    head: tuple[str, ...]  # before any loop
    body: tuple[str, ...]  # of the scan over chunks; empty in a parallel kernel
    loops: tuple[Loop, ...]  # over key tiles, in a parallel kernel
    constants: tuple[str, ...]  # keyword arguments of the op that the kernel reads
    rows_of: tuple[str, ...]  # buffers that are also read row by row
    steps_of: tuple[str, ...]  # the caller's tensors that are read by pointer


def _users(statements: list[Statement]) -> dict[int, list[Statement]]:
    """Who refers to each statement, once for each reference."""
    users: dict[int, list[Statement]] = {}
    for statement in statements:
        for index in statement.references():
            users.setdefault(index, []).append(statement)
    return users


def _sink(statements: list[Statement]) -> None:
    """What is made before a loop and first needed behind it is made there: in the loop it would only occupy registers."""
    users = _users(statements)
    for statement in reversed(statements):
        later = [user.scope for user in users.get(statement.index, ())]
        if not later or statement.lines or statement.text == statement.name:
            continue
        if statement.scope == 0:
            statement.scope = min(later) // SCOPES * SCOPES
        elif statement.scope % SCOPES == BODY and min(later) == statement.scope - BODY + BEHIND:
            statement.scope = min(later)


def _by_rank(statements: list[Statement], inlined: Callable[[Statement], bool]) -> list[Statement]:
    """The statements in order of rank where references allow it; of one rank first what ends the use of a product, otherwise in the order
    of demand."""

    def references(statement: Statement) -> set[int]:
        found: set[int] = set()
        for index in statement.references():
            target = statements[index]
            found |= references(target) if inlined(target) else {target.index}
        return found

    needs = {i: {r for r in references(s) if statements[r].scope == s.scope} for i, s in enumerate(statements)}
    users: dict[int, list[int]] = {}
    for i, wanted in needs.items():
        for r in wanted:
            users.setdefault(r, []).append(i)
    first = _urgency(statements, users)

    def key(i: int) -> tuple[int, bool, int]:
        return first[i], not statements[i].ends, i

    ready = [key(i) for i, wanted in needs.items() if not wanted]
    heapq.heapify(ready)
    order: list[Statement] = []
    while ready:
        i = heapq.heappop(ready)[-1]
        order.append(statements[i])
        for user in users.get(i, ()):
            needs[user].discard(i)
            if not needs[user]:
                heapq.heappush(ready, key(user))
    assert len(order) == len(statements)
    return order


def _urgency(statements: list[Statement], users: dict[int, list[int]]) -> dict[int, int]:
    """A statement's rank; one without a rank of its own is as urgent as what first needs it."""
    first: dict[int, int] = {}
    for i in reversed(range(len(statements))):
        later = [first[u] for u in users.get(i, ()) if u in first]
        own = statements[i].rank
        first[i] = own if own else max(0, min(later, default=0))
    return first


def assemble(work: Lowering) -> Lowered:
    """Writes plain values into their only user and lays the statements out by scope."""
    statements = work.statements
    if not work.scan:
        _sink(statements)
    uses = _users(statements)

    def alone(statement: Statement) -> Statement | None:
        """The only user, when it stands in the same scope."""
        users = uses.get(statement.index, [])
        return users[0] if len(users) == 1 and users[0].scope == statement.scope else None

    def guarded(statement: Statement) -> bool:
        """Whether it is computed for a guarded score alone: then it stands behind the guard as well, unless it comes from memory."""
        user = alone(statement)
        return (
            user is not None
            and (len(user.lines) > 1 or (inlined(user) and guarded(user)))
            and ".load(" not in statement.text
            and not statement.text.startswith("tl.load")
        )

    def inlined(statement: Statement) -> bool:
        if statement.text == statement.name or re.fullmatch(r"-?[\w.]+", statement.text):
            return True  # an accumulator, a number or a keyword argument
        return (statement.plain and alone(statement) is not None) or guarded(statement)

    def resolve(text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            target = statements[int(match.group(1))]
            if not inlined(target):
                return target.name
            inner = resolve(target.text)
            whole = match.start() == 0 and match.end() == len(text)
            return f"({inner})" if (target.binary or inner.startswith("-")) and not whole else inner

        return REFERENCE.sub(replace, text)

    scopes: dict[int, list[str]] = {}
    for statement in _by_rank(statements, inlined):
        lines = scopes.setdefault(statement.scope, [])
        comment = f"  # {statement.comment.strip()}" if statement.comment.strip() else ""
        if statement.lines:
            lines += [resolve(line) + (comment if i == len(statement.lines) - 1 else "") for i, line in enumerate(statement.lines)]
        elif statement.index in uses and not inlined(statement):
            lines.append(f"{statement.name} = {resolve(statement.text)}{comment}")
    constants, rows_of, steps_of = (tuple(sorted(names)) for names in (work.constants, work.rows_of, work.steps_of))
    if work.scan:
        return Lowered(work.kernel, tuple(scopes.get(0, ())), tuple(scopes.get(1, ())), (), constants, rows_of, steps_of)

    def lines_of(scope: int) -> tuple[str, ...]:
        return tuple(scopes.get(scope, ()))

    def loop(scope: int, inner: Loop | None, after: int) -> Loop:
        return Loop(tuple(work.accumulators.get(scope, ())), lines_of(scope), inner, lines_of(after))

    passes = []
    for begin in range(0, max([*scopes, 0]), SCOPES):
        levels = loop(begin + EACH_LEVEL, None, begin + BEHIND) if begin + EACH_LEVEL in scopes else None
        passes.append(loop(begin + BODY, levels, begin + SCOPES))
    return Lowered(work.kernel, lines_of(0), (), tuple(passes), constants, rows_of, steps_of)
