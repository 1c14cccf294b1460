"""parse: text -> Spec. Python's grammar through `ast`, typed by axis, never executed."""

from __future__ import annotations

import ast
import contextlib
import inspect
import keyword
import math
import re
import warnings
from pathlib import Path

import sympy
from sympy import Expr

from recgen import hints, reserved
from recgen import typing_rules as rules
from recgen.elementwise import SIZES, Axis, Domain, Input, apply, number
from recgen.errors import SpecError
from recgen.expressions import ZOO_ARITY, Expressions
from recgen.hints import decay, flip, nearest
from recgen.spec import KEY, SCALAR, STATE, VALUE, Binary, Call, Line, Name, Neg, Node, Number, Spec, describe

__all__ = ["Domain", "Input", "Spec", "parse"]

AXIS_KINDS = ("scalar", "key", "value", "head", "const")
DOMAINS: dict[str, Domain] = {
    "log_decay": Domain("log_decay", -math.inf, 0.0),
    "unit": Domain("unit", 0.0, 1.0),
    "unit_norm": Domain("unit_norm", -1.0, 1.0),
}
STATEMENT = "a declaration `x: key` or an equation `S = ...`"
REAL = Domain("real", -math.inf, math.inf)


def parse(text: str, path: str = "<text>", name: str | None = None) -> Spec:
    """Read a spec; name is the file's stem when it is not given. Raises SpecError, and nothing else, for a bad spec."""
    if name is None:
        stem = Path(path).stem
        name = stem if stem.isidentifier() and not path.startswith("<") else "recurrence"
    if not name.isidentifier() or keyword.iskeyword(name):
        raise SpecError(path, 1, 1, f"{name!r} is no name for a recurrence", expected="an identifier", found=repr(name))
    reason = reserved.why(name, an_input=True)
    if reason is not None:
        raise SpecError(path, 1, 1, f"`{name}` is no name for a recurrence: {reason}", expected="another name")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    spec = _Parser(text, path, name).run()
    spec.verify()
    return spec


class _Parser(Expressions):
    """One pass over the statements, with the table of what each name is so far."""

    def __init__(self, text: str, path: str, name: str) -> None:
        super().__init__(text, path)
        self.name = name
        self.inputs: list[Input] = []
        self.cols: dict[str, int] = {}  # where an input was declared
        self.consts: list[tuple[str, Node]] = []
        self.lines: list[Line] = []

    # statements

    def run(self) -> Spec:
        """The whole file."""
        body = self.syntax()
        doc = ""
        match body:
            case [ast.Expr(value=ast.Constant(value=str(text))), *rest]:
                doc, body = inspect.cleandoc(text), rest
        for s in body:
            if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Name):
                self.later.setdefault(s.targets[0].id, s.lineno)
        for s in body:
            self.statement(s)
        self.complete()
        return Spec(self.name, doc, tuple(self.inputs), tuple(self.consts), tuple(self.lines), self.text, self.path)

    def syntax(self) -> list[ast.stmt]:
        """Python's own parser; its errors become ours."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self.text, self.path).body
        except SyntaxError as e:
            line, col = min(e.lineno or 1, len(self.rows)), max(e.offset or 1, 1)
            for declared in range(1, line + 1):
                self.refuse_keyword(declared, used=line)
            what = re.split(r"\. | \(detected", e.msg)[0]  # without the advice for Python
            if what == "unexpected indent":
                col = len(self.rows[line - 1]) - len(self.rows[line - 1].lstrip()) + 1
            closing = {"[": "]", "(": ")", "{": "}"}
            expected = f"a closing `{closing[what[1]]}`" if what.endswith("was never closed") else STATEMENT
            hint = hints.of_syntax(self.rows[line - 1], col, what)
            raise self.error((line, col), f"syntax error: {what}", expected=expected, hint=hint) from None
        except (ValueError, RecursionError, MemoryError) as e:
            raise self.error((1, 1), f"this text cannot be read: {e or type(e).__name__}") from None

    def refuse_keyword(self, line: int, used: int) -> None:
        """A keyword of Python at the start of a declaration or an equation, if it stands on the line `used`. (`lambda: x` is Python; what
        uses it then is none.)"""
        word = re.match(r"\s*(\w+)\s*[:=]", self.rows[line - 1])
        if word and keyword.iskeyword(word[1]) and re.search(rf"\b{word[1]}\b", self.rows[used - 1]):
            hint = f"choose another name, such as `{word[1][:3]}`"
            at = (line, word.start(1) + 1)
            raise self.error(at, f"`{word[1]}` is a keyword of Python", expected="a name", found=f"`{word[1]}`", hint=hint) from None

    def statement(self, s: ast.stmt) -> None:
        """A declaration or an equation; nothing else is in the language."""
        match s:
            case ast.AnnAssign(target=ast.Name(id=name)):
                self.declare(s, name)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.assign(s, name, value)
            case ast.AugAssign(target=target, op=op, value=value):
                left, right = ast.unparse(target), ast.unparse(ast.BinOp(target, op, value))
                what, hint = "an equation has a plain `=`", f"write {left} = {right}"
                raise self.error(s, what, expected="NAME = expression", found=f"`{ast.unparse(s)}`", hint=hint)
            case ast.Assign(targets=[first, *_] as targets):
                what, found = "an equation has one name on its left", " = ".join(ast.unparse(t) for t in targets)
                indexed = hints.of_expression(first)
                raise self.error(s, what, expected="NAME = expression", found=f"`{found} = ...`", hint=indexed)
            case _:
                self.refuse_keyword(s.lineno, used=s.lineno)
                found = f"`{ast.unparse(s).splitlines()[0]}`"
                raise self.error(s, "not a statement of a spec", expected=STATEMENT, found=found, hint=self.meant(s))

    def meant(self, s: ast.stmt) -> str | None:
        """What a statement that a spec does not have was meant to be."""
        row = self.rows[s.lineno - 1]
        match s:
            case ast.Import() | ast.ImportFrom():
                return "a spec needs no imports: its functions are known, and it runs none"
            case ast.For() | ast.While() | ast.If() | ast.With() | ast.FunctionDef() | ast.ClassDef():
                return "a spec says what one token does, line by line: no loops, conditions or definitions"
            case ast.Expr(value=ast.Constant(value=str())):
                return "a comment starts with `#`"
            case _ if hints.is_continued(row.split("#")[0].rstrip()):
                return hints.SEVERAL_LINES
            case ast.Expr(value=ast.Compare()):
                return "an equation has a plain `=`"
            case ast.Expr(value=ast.expr() as value) | ast.Return(value=ast.expr() as value):
                with contextlib.suppress(SpecError):
                    node = self.expression(value)
                    target = {STATE: "S", VALUE: "o"}.get(node.shape) if node.degree else None
                    return f"write {target} = {ast.unparse(value)}" if target else None
        return None

    def complete(self) -> None:
        """What the file as a whole must have."""
        end = (len(self.rows) - (self.rows[-1] == "" and len(self.rows) > 1), 1)
        for target, shape, what, line, hint in (
            ("S", STATE, "the state is never updated", "a line `S = ...`", "a write is S = S + v @ k.T"),
            ("o", VALUE, "there is no output", "one line `o = ...`", "a read is o = S @ q"),
        ):
            if target in (n.target for n in self.lines):
                continue
            for n in reversed(self.lines):
                if n.value.shape == shape and n.value.degree and (target == "S" or n.target not in self.used):
                    meant = f"`{n.target}` is a local: write {target} = {n.value}"
                    raise self.error((n.line, n.col), what, expected=line, found=f"`{n.target} = ...`", hint=meant)
            raise self.error(end, what, expected=line, hint=hint)
        for i in self.inputs:
            if i.name not in self.used:
                raise self.error((i.line, self.cols[i.name]), f"`{i.name}` is declared and never used", hint="use it or remove it")
        names = [i.name for i in self.inputs]
        for i in self.inputs:
            reason = reserved.beside(i.name, names)
            if reason is not None:
                raise self.error((i.line, self.cols[i.name]), f"`{i.name}` is reserved: {reason}", expected="another name for an input")
        for axis, word in (("t", "time"), ("k", "key"), ("v", "value")):
            if not any(axis in (i.axes or ()) for i in self.inputs):
                raise self.error(end, f"no input has a {word} axis", hint="declare one, such as q: key or v: value")

    def new_name(self, at: ast.AST, name: str, what: str) -> None:
        """Refuse a name that means something else."""
        reason = reserved.why(name, an_input=what == "an input")
        if reason is not None:
            raise self.error(at, f"`{name}` is reserved: {reason}", expected=f"another name for {what}")
        if name in rules.FUNCTIONS or name in ZOO_ARITY:
            raise self.error(at, f"`{name}` is reserved: it is a function", expected=f"another name for {what}")

    def declare(self, s: ast.AnnAssign, name: str) -> None:
        """NAME: kind[...]."""
        self.new_name(s.target, name, "an input")
        if name in self.cols:
            first = next(i.line for i in self.inputs if i.name == name)
            raise self.error(s.target, f"`{name}` is declared twice", found=f"a first declaration on line {first}")
        if name in self.bound:
            raise self.error(s.target, f"`{name}` is declared after it was assigned", hint="declare inputs first")
        kind, args = _subscript(s.annotation)
        default: Expr | None = None
        axes: tuple[Axis, ...] | None = None
        domain = REAL
        if kind == "const":
            if args:
                raise self.error(args[0], "a const has no axis and no domain", expected="NAME: const = number")
            if s.value is None:
                raise self.error(s, f"the const `{name}` has no default", expected=f"{name}: const = number", hint="such as K ** -0.5")
            default = self.const(name, s.value)
        else:
            axes, domain = self.axes(s, kind, args)
            if s.value is not None:
                declaration = f"{name}: {ast.unparse(s.annotation)}"
                hint = f"write {declaration} for a tensor, {name}: const = {ast.unparse(s.value)} for a number"
                raise self.error(s.value, "only a const has a default", expected=declaration, found=f"`{ast.unparse(s)}`", hint=hint)
        line, col = self.place(s)
        self.cols[name] = col
        self.inputs.append(Input(name, axes, domain, default, line))
        self.bound[name] = (KEY if axes and "k" in axes else VALUE if axes and "v" in axes else SCALAR, 0)

    def axes(self, s: ast.AnnAssign, kind: str | None, args: list[ast.expr]) -> tuple[tuple[Axis, ...], Domain]:
        """The axes and the domain of `kind[args]`."""
        table: dict[str, tuple[Axis, ...]] = {"scalar": ("t",), "key": ("t", "k"), "value": ("t", "v"), "head": ()}
        if kind not in table:
            word = kind or ast.unparse(s.annotation)
            hint = hints.of_axis(word, AXIS_KINDS)
            raise self.error(s.annotation, f"unknown axis `{word}`", expected=", ".join(AXIS_KINDS), found=f"`{word}`", hint=hint)
        axes = table[kind]
        if kind == "head" and args and isinstance(args[0], ast.Name) and args[0].id in ("key", "value"):
            axes = ("k",) if args[0].id == "key" else ("v",)
            args = args[1:]
        if not args:
            return axes, REAL
        match args:
            case [ast.Name(id=d)] if d in DOMAINS:
                if d == "unit_norm" and not {"k", "v"} & set(axes):
                    raise self.error(args[0], "only a row can have unit norm", found=describe(SCALAR))
                return axes, DOMAINS[d]
            case [low, high]:
                a, b = self.literal(low), self.literal(high)
                if not a < b:
                    raise self.error(low, "an empty interval", expected="low < high", found=f"[{a:g}, {b:g}]")
                return axes, Domain("interval", a, b)
        word = ast.unparse(args[0]) if len(args) == 1 else ", ".join(ast.unparse(a) for a in args)
        words = (*DOMAINS, "key", "value") if kind == "head" else tuple(DOMAINS)
        expected = ", ".join(words) + ", or an interval `low, high`"
        raise self.error(args[0], f"unknown domain `{word}`", expected=expected, found=f"`{word}`", hint=hints.of_domain(word, words))

    def literal(self, e: ast.expr) -> float:
        """A number of an interval."""
        match e:
            case ast.Constant(value=int(x) | float(x)) if not isinstance(x, bool):
                return float(x)
            case ast.Name(id="inf"):
                return math.inf
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.literal(operand)
        known = f"`{ast.unparse(e)}`"
        raise self.error(e, "an interval has two numbers", expected="low, high", found=known, hint=nearest(ast.unparse(e), DOMAINS))

    def const(self, name: str, e: ast.expr) -> Expr:
        """The default of a const: numbers, K, V, arithmetic."""
        self.in_const = True
        node = self.expression(e)
        self.in_const = False
        if node.shape != SCALAR:
            raise self.error(e, "the default of a const is a number", found=describe(node.shape))
        self.consts.append((name, node))
        return _size_expr(node)

    def assign(self, s: ast.Assign, name: str, value: ast.expr) -> None:
        """NAME = expression."""
        if name not in ("S", "o"):
            self.new_name(s.targets[0], name, "a local")
        line, col = self.place(s)
        if name == "o" and any(n.target == "o" for n in self.lines):
            first = next(n.line for n in self.lines if n.target == "o")
            raise self.error(s, "the output is assigned twice", expected="one line `o = ...`", found=f"a first one on line {first}")
        self.target = name
        node = self.expression(value)
        want = {"S": STATE, "o": VALUE}.get(name)
        if want is not None and node.shape == ("?", "?"):
            node = rules.resolve(node, want[0])
        if want is not None and node.shape != want:
            what = {"S": "the state is value x key", "o": "the output is a value row"}[name]
            hint = "a read is o = S @ q" if name == "o" else "a write is S = S + v @ k.T"
            if node.shape == want[::-1]:
                hint = f"transpose it: {flip(value)}"
            hint = decay(value, node, want) or hint
            raise self.error(value, what, expected=describe(want), found=describe(node.shape), hint=hint)
        if node.shape == ("?", "?"):
            raise self.error(value, "nothing here says how large I is", hint="use it where it meets S or a row, not alone")
        if node.degree > 1:
            raise self.nonlinear(value, "a product of two reads")
        self.lines.append(Line(name, node, line, col))
        if name != "S":
            self.bound[name] = (node.shape, node.degree)


def _subscript(e: ast.expr) -> tuple[str | None, list[ast.expr]]:
    """kind[a, b] -> kind, [a, b]."""
    match e:
        case ast.Name(id=kind):
            return kind, []
        case ast.Subscript(value=ast.Name(id=kind), slice=ast.Tuple(elts=elts)):
            return kind, elts
        case ast.Subscript(value=ast.Name(id=kind), slice=one):
            return kind, [one]
    return None, []


def _size_expr(node: Node) -> Expr:
    """A const's default in SymPy."""
    match node:
        case Number(value=value):
            return number(value)
        case Name(name=name):
            return SIZES[name]
        case Neg(x=x):
            return -_size_expr(x)
        case Call(fn=fn, args=(x,)):
            return apply(fn, _size_expr(x))
        case Binary(op=op, x=x, y=y):
            a, b = _size_expr(x), _size_expr(y)
            return {"+": a + b, "-": a - b, "*": a * b, "/": a * sympy.Pow(b, -1), "**": sympy.Pow(a, b)}[op]
    raise TypeError(node)
