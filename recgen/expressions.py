"""expressions: Python's syntax of an expression -> a typed node, or an error in its place."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable

from recgen import hints
from recgen import typing_rules as rules
from recgen.elementwise import SIZES
from recgen.errors import SpecError
from recgen.hints import decay, flip, nearest, source, swap
from recgen.spec import KEY, SCALAR, STATE, VALUE, Binary, Call, Name, Neg, Node, Number, Shape, children, describe
from recgen.zoo import ZOO

_OPS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**"}
_OTHER_OPS = {ast.BitXor: "^", ast.FloorDiv: "//", ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|", ast.LShift: "<<", ast.RShift: ">>"}
ZOO_ARITY = {s.split("(")[0]: 0 if s.endswith("()") else s.count(",") + 1 for s in ZOO}

LARGEST = 1e30
STEEPEST = 64  # exponent
DEEPEST = 100  # levels of an expression


class Expressions:
    """The names that are known so far, and how expressions over them are read."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.rows = text.split("\n")
        self.text = text
        self.bound: dict[str, tuple[Shape, int]] = {}
        self.used: set[str] = set()
        self.later: dict[str, int] = {}  # local -> the line that first assigns it
        self.target = ""  # the name that the line assigns
        self.in_const = False
        self.in_objective = False
        self.outer: ast.expr | None = None  # the call of a zoo name whose definition is being read
        self.params: dict[str, Node] = {}
        self.depth = 0

    # errors

    def error(self, at: ast.AST | tuple[int, int], message: str, **more: str | None) -> SpecError:
        """The SpecError at a node (of the spec, also while a definition of the zoo is being read) or at (line, col)."""
        line, col = at if isinstance(at, tuple) else self.place(at)
        source = self.rows[line - 1] if 0 < line <= len(self.rows) else ""
        return SpecError(self.path, line, col, message, source=source, **more)

    def place(self, at: ast.AST) -> tuple[int, int]:
        """Line and column of a node, both from 1; `ast` counts columns in bytes."""
        at = self.outer or at
        line: int = getattr(at, "lineno", 1)
        before = self.rows[line - 1].encode()[: getattr(at, "col_offset", 0)]
        return line, len(before.decode(errors="replace")) + 1

    def sign(self, e: ast.BinOp, op: str) -> tuple[int, int]:
        """Where the operator of e stands."""
        line = e.left.end_lineno or 1
        after = len(self.rows[line - 1].encode()[: e.left.end_col_offset].decode(errors="replace"))
        col = self.rows[line - 1].find(op, after)
        return self.place(e) if col < 0 else (line, col + 1)

    def nonlinear(self, at: ast.AST, found: str) -> SpecError:
        """What is not linear in the state is refused."""
        return self.error(at, "not linear in the state S", expected="S to occur once in each product, in no function", found=found)

    # expressions

    def expression(self, e: ast.expr) -> Node:
        """A typed node."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(e, "an expression nested too deeply", expected=f"at most {DEEPEST} levels", hint="give a part of it a name")
        node = self.typed(e)
        self.depth -= 1
        return node

    def typed(self, e: ast.expr) -> Node:
        """One level of an expression."""
        line, col = self.place(e)
        match e:
            case ast.Constant(value=int(x) | float(x)) if not isinstance(x, bool):
                if not abs(x) <= LARGEST:
                    raise self.error(e, "a number that is too large", expected=f"at most {LARGEST:g}")
                return Number(x, shape=SCALAR, degree=0, line=line, col=col)
            case ast.Name(id=name):
                return self.lookup(e, name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.expression(operand)
                return Neg(inner, shape=inner.shape, degree=inner.degree, line=line, col=col)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.expression(operand)
            case ast.Attribute(value=value, attr="T"):
                return rules.transpose(self.expression(value), line, col)
            case ast.Attribute(attr=attr):
                hint = hints.of_expression(e)
                raise self.error(e, f"unknown attribute `.{attr}`", expected="`.T`, the transpose", found=f"`.{attr}`", hint=hint)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPS:
                return self.binary(e, _OPS[type(op)], left, right)
            case ast.Call(func=ast.Name(id=fn), args=args, keywords=keywords):
                return self.call(e, fn, args, keywords)
        at: ast.expr | tuple[int, int] = e
        found = ast.unparse(e)
        if isinstance(e, ast.BinOp):
            found = _OTHER_OPS[type(e.op)]
            at = self.sign(e, found)
        expected = "names, numbers, + - * / ** @ .T and functions"
        raise self.error(at, "not an expression of a spec", expected=expected, found=f"`{found}`", hint=hints.of_expression(e))

    def lookup(self, e: ast.expr, name: str) -> Node:
        """A name, or I."""
        line, col = self.place(e)
        if self.outer is not None and name in self.params:
            return self.params[name]
        if name == "I" and not self.in_const:
            return rules.eye(line, col)
        if name in SIZES:
            return Name(name, shape=SCALAR, degree=0, line=line, col=col)
        if self.in_const:
            raise self.error(e, f"`{name}` is not known when a const is set", expected="numbers and the sizes K and V", found=f"`{name}`")
        if name == "S":
            return Name("S", shape=STATE, degree=1, line=line, col=col)
        if name == "o":
            raise self.error(e, "the output `o` cannot be read", hint="give the value a name of its own first")
        if name not in self.bound:
            hint = hints.of_name(name, (*self.bound, "S", "I", "K", "V"))
            if self.later.get(name, line + 1) <= line:
                hint = f"`{name}` is a local of one token; what goes from token to token is the state S"
            elif name in self.later:
                hint = f"`{name}` is assigned on line {self.later[name]}, after this"
            elif name != "scalar" and (name in rules.FUNCTIONS or name in ZOO_ARITY):
                hint = f"`{name}` is a function: write {name}(...)"
            raise self.error(e, f"unknown name `{name}`", expected="an input, a local, S, I, K or V", found=f"`{name}`", hint=hint)
        self.used.add(name)
        shape, degree = self.bound[name]
        return Name(name, shape=shape, degree=degree, line=line, col=col)

    def binary(self, e: ast.BinOp, op: str, left: ast.expr, right: ast.expr) -> Node:
        """x op y, typed."""
        x, y = self.expression(left), self.expression(right)
        if op == "@" and SCALAR in (x.shape, y.shape):
            raise self.error(e, "`@` between a scalar and another factor", hint=f"a scalar multiplies with `*`: {swap(e, '*')}")
        x, y = rules.unify(op, x, y)
        degree = x.degree + y.degree if op in "*@" else max(x.degree, y.degree)
        if op in ("/", "**") and y.degree:
            raise self.nonlinear(right, "the state below a fraction" if op == "/" else "the state in an exponent")
        if op == "**" and x.degree:
            raise self.nonlinear(left, "a power of the state")
        if op in "*@" and degree > 1 and not self.in_objective:
            raise self.nonlinear(e, f"`{ast.unparse(e)}`, where both factors read S")
        if op == "**" and not -STEEPEST <= _constant(y) <= STEEPEST:
            expected = f"a number from -{STEEPEST} to {STEEPEST}"
            varies = any(isinstance(n, Name) for n in walk(y))
            hint = f"a power that varies is exp({source(right)} * log({ast.unparse(left)}))" if varies else None
            raise self.error(right, "an exponent is a constant number", expected=expected, found=f"`{ast.unparse(right)}`", hint=hint)
        if op == "/" and isinstance(y, Number) and y.value == 0:
            raise self.error(right, "division by zero")
        shape = rules.shape_of(op, x, y)
        if isinstance(shape, rules.Mismatch):
            found = f"{describe(x.shape)} `{ast.unparse(left)}` {op} {describe(y.shape)} `{ast.unparse(right)}`"
            texts = {"x": source(left), "y": source(right), "xt": flip(left), "yt": flip(right)}
            bare = {"bare_x": ast.unparse(left), "bare_y": ast.unparse(right)}
            hint = shape.hint.format(**texts, **bare) if shape.hint else None
            hint = decay(left, x, y.shape) or (decay(right, y, x.shape) if op in "+-" else None) or hint
            raise self.error(e, shape.message, expected=shape.expected, found=found, hint=hint)
        line, col = self.place(e)
        return Binary(op, x, y, shape=shape, degree=degree, line=line, col=col)

    def call(self, e: ast.Call, fn: str, args: list[ast.expr], keywords: list[ast.keyword]) -> Node:
        """A function, grad, or a transition of the zoo."""
        if keywords:
            raise self.error(keywords[0].value, f"`{fn}` takes its arguments by position", found=f"`{keywords[0].arg}=`")
        arity = ZOO_ARITY.get(fn) if fn in ZOO_ARITY else rules.FUNCTIONS.get(fn)
        if arity is None or (self.in_const and fn not in ("sqrt", "exp", "log")):
            known = ("sqrt", "exp", "log") if self.in_const else (*rules.FUNCTIONS, *ZOO_ARITY)
            hint = nearest(fn, known) if self.in_const else hints.of_function(fn, known)
            if fn in self.bound:
                hint = f"`{fn}` is a name, not a function: a product is written with `*`"
            raise self.error(e, f"unknown function `{fn}`", expected=", ".join(known), found=f"`{fn}`", hint=hint)
        if len(args) != arity:
            sign = next((s for s in ZOO if s.startswith(fn + "(")), None)
            hint = f"{sign} = {ZOO[sign]}" if sign else None
            found = f"{len(args)} argument{'s' * (len(args) != 1)}"
            raise self.error(e, f"`{fn}` takes {arity} argument{'s' * (arity != 1)}", found=found, hint=hint)
        if fn == "grad":
            return self.grad(e, args)
        if fn in ZOO_ARITY:
            return self.zoo(e, fn, args)
        nodes = tuple(self.expression(a) for a in args)
        if fn == "dot":
            return self.dot(e, nodes, args)
        (x,) = nodes
        norms = fn in ("norm", "norm2", "l2norm")
        allowed = (KEY, VALUE, STATE) if fn == "norm2" and self.in_objective else (KEY, VALUE) if norms else (SCALAR, KEY, VALUE)
        if x.degree and not (fn == "norm2" and self.in_objective and x.degree == 1):
            hint = "a squared norm of a read is an objective: grad(norm2(S @ k - v) / 2, S)"
            if fn != "norm2" and self.target == "o":
                hint = f"apply {fn} to the output, after the op: the recurrence itself is linear in S"
            elif fn != "norm2":
                meant = "normalise keys, k = l2norm(k)" if norms else f"an input may gate it, {fn}(x) * S"
                hint = f"a recurrence is linear in its state: {meant}"
            expected = f"an argument of `{fn}` that is free of S"
            raise self.error(e, "not linear in the state S", expected=expected, found=f"`{ast.unparse(e)}`", hint=hint)
        if x.shape not in allowed:
            expected = " or ".join(describe(s) for s in allowed)
            hint = None
            match args[0]:
                case ast.Call(func=ast.Name(id="diag" | "diagonal" | "scalar" as outer), args=[inner]):
                    hint = f"write {outer}({fn}({ast.unparse(inner)}))"
            raise self.error(args[0], f"`{fn}` of the wrong kind of value", expected=expected, found=describe(x.shape), hint=hint)
        line, col = self.place(e)
        shape = SCALAR if fn in ("norm", "norm2") else x.shape
        return Call(fn, nodes, shape=shape, degree=2 * x.degree if fn == "norm2" else x.degree, line=line, col=col)

    def dot(self, e: ast.Call, nodes: tuple[Node, ...], args: list[ast.expr]) -> Node:
        """dot(x, y): both key rows or both value rows."""
        x, y = nodes
        if x.shape not in (KEY, VALUE) or x.shape != y.shape:
            found = f"{describe(x.shape)} `{ast.unparse(args[0])}` and {describe(y.shape)} `{ast.unparse(args[1])}`"
            texts = {"x": source(args[0]), "y": source(args[1]), "xt": flip(args[0]), "yt": flip(args[1])}
            outer = rules.outer(x.shape, y.shape)
            hint = f"an outer product is {outer.format(**texts)}" if outer else "a read is S @ q" if STATE in (x.shape, y.shape) else None
            raise self.error(e, "`dot` of two different kinds", expected="two key rows or two value rows", found=found, hint=hint)
        if x.degree + y.degree > 1 and not self.in_objective:
            raise self.nonlinear(e, f"`{ast.unparse(e)}`, where both factors read S")
        line, col = self.place(e)
        return Call("dot", nodes, shape=SCALAR, degree=x.degree + y.degree, line=line, col=col)

    def grad(self, e: ast.Call, args: list[ast.expr]) -> Node:
        """grad(objective, S)."""
        if not (isinstance(args[1], ast.Name) and args[1].id == "S"):
            raise self.error(args[1], "a gradient is taken with respect to the state", expected="`S`", found=f"`{ast.unparse(args[1])}`")
        if self.in_objective:
            raise self.error(e, "a gradient inside a gradient")
        self.in_objective = True
        node = self.expression(args[0])
        self.in_objective = False
        if node.shape != SCALAR:
            hint = "such as norm2(S @ k - v) / 2"
            raise self.error(args[0], "an objective is a scalar", expected="a scalar", found=describe(node.shape), hint=hint)
        for n in walk(node):
            if isinstance(n, Name) and n.degree and n.name != "S":
                hint = "write the read out inside grad, such as norm2(S @ k - v)"
                raise self.error(
                    (n.line, n.col), f"the objective reads the state through the local `{n.name}`", expected="S itself", hint=hint
                )
            if n.degree > 2 or (isinstance(n, Binary) and n.op == "*" and n.x.degree and n.y.degree):
                raise self.error((n.line, n.col), "an objective is at most quadratic in S, built from norm2 and dot", found=f"`{n}`")
        if node.degree == 0:
            raise self.error(args[0], "the objective does not depend on S", found=f"`{ast.unparse(args[0])}`")
        line, col = self.place(e)
        return rules.grad(node, line, col)

    def zoo(self, e: ast.Call, fn: str, args: list[ast.expr]) -> Node:
        """A named transition: its definition, read with the arguments in place of its parameters."""
        signature = next(s for s in ZOO if s.startswith(fn + "("))
        nodes = [self.expression(a) for a in args]
        for a, n in zip(args, nodes, strict=True):
            if n.degree:
                raise self.error(
                    a, f"`{fn}` of something that reads the state", expected="arguments free of S", found=f"`{ast.unparse(a)}`"
                )
            if n.shape not in (SCALAR, KEY, VALUE):
                found = f"{describe(n.shape)} `{ast.unparse(a)}`"
                hint = f"{signature} = {ZOO[signature]}"
                raise self.error(a, f"`{fn}` of the wrong kind of value", expected="a scalar or a row", found=found, hint=hint)
        saved = self.outer, self.params
        self.outer = self.outer or e
        names = [p.strip() for p in signature[len(fn) + 1 : -1].split(",") if p.strip()]
        self.params = dict(zip(names, nodes, strict=True))
        try:
            return self.expression(ast.parse(ZOO[signature], mode="eval").body)
        except SpecError as err:
            err.hint = f"{signature} = {ZOO[signature]}"
            raise
        finally:
            self.outer, self.params = saved


def walk(node: Node) -> Iterable[Node]:
    yield node
    for c in children(node):
        yield from walk(c)


def _constant(node: Node) -> float:
    """The number that a node without names stands for; nan when it stands for none."""
    match node:
        case Number(value=value):
            return float(value)
        case Neg(x=x):
            return -_constant(x)
        case Binary(op=op, x=x, y=y):
            return _fold(op, _constant(x), _constant(y))
    return math.nan


def _fold(op: str, a: float, b: float) -> float:
    try:
        match op:
            case "+":
                return a + b
            case "-":
                return a - b
            case "*":
                return a * b
            case "/":
                return a / b
            case "**":
                power = a**b
                return power if isinstance(power, float) else math.nan
    except ArithmeticError:
        pass
    return math.nan
