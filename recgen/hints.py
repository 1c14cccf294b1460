"""hints: how a spec writes what other notations, other libraries and Python write otherwise. Nothing here decides what is wrong."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable

from recgen import reserved
from recgen.spec import STATE, Binary, Node, Shape
from recgen.typing_rules import FUNCTIONS

ONE_TOKEN = "a spec says what one token does, without an index: S on the right of `=` is the state before the line"
SEVERAL_LINES = "an equation over several lines stands in parentheses"
NAMES = "a name has letters, digits and _"
LACKING = "what specs lack is computed before the op and declared as an input"
PRODUCT = "a product has a sign: `*` elementwise or with a scalar, `@` between rows and matrices"

# The type or the shape that an input has elsewhere -> its axis.
AXES: dict[str, str] = {
    "query": "key",
    "K": "key",
    "V": "value",
    "H": "head",
    "gate": "scalar",
    "vector": "key or value",
    "float": "const",
    "int": "const",
    "[B, T, H, K]": "key",
    "[B, T, H, V]": "value",
    "[B, T, H]": "scalar",
    "[H]": "head",
    "[H, K]": "head[key]",
    "[H, V]": "head[value]",
    **{f"head[{axis}][{d}]": f"head[{axis}, {d}]" for axis in ("key", "value") for d in ("log_decay", "unit", "unit_norm")},
    **dict.fromkeys(("param", "parameter", "weight"), "head for one number a head, or head[key], head[value]"),
}
# Words for domains -> the domain.
DOMAINS: dict[str, str] = {
    **dict.fromkeys(("normalized", "normed", "norm", "l2norm"), "unit_norm"),
    **dict.fromkeys(("sigmoid", "probability", "fraction"), "unit"),
    **dict.fromkeys(("decay", "log", "negative", "gate"), "log_decay"),
}
# A function that specs lack -> how it is written.
ELSEWHERE: dict[str, str] = {
    "S": "a read is S @ q",
    "outer": "an outer product is v @ k.T",
    "einsum": "a read is S @ q, a write is v @ k.T",
    "matmul": "a product of rows and matrices is x @ y",
    "inner": "an inner product is dot(x, y)",
    "sum": "a sum over channels is dot(x, y), of squares norm2(x)",
    "transpose": "a transpose is x.T",
    "eye": "the identity matrix is I",
    "normalize": "a row of unit norm is l2norm(x)",
    "pow": "a power is x ** 2",
    "square": "a power is x ** 2",
    "rsqrt": "a power is x ** -0.5",
    "swish": "swish is silu(x)",
    "logsigmoid": "its equal is -softplus(-x)",
    "layernorm": "what normalises the output is applied after the op",
    "rmsnorm": "what normalises the output is applied after the op",
}
# Signs of mathematics that Python cannot read.
CHARACTERS: dict[str, str] = {
    "·": "*",
    "⋅": "*",
    "×": "*",
    "⊙": "*",
    "∘": "*",
    "−": "-",
    "–": "-",
    "←": "=",
    "⊗": "v @ k.T",
    "⊤": ".T",
    "′": ".T",
    "²": "** 2",
    "√": "sqrt(x)",
    "∇": "grad(objective, S)",
}
MATRICES: tuple[Shape, ...] = (STATE, ("k", "k"))  # what a state is added to, or multiplied with on its right
_KINDS = r"(scalar|key|value|head|const)\b"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is spelt almost like this one."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else None


def of_axis(word: str, kinds: Iterable[str]) -> str | None:
    """For an axis that does not exist."""
    if called := re.fullmatch(_KINDS + r"\((.*)\)", word):
        return f"a domain stands in brackets: {called[1]}[{called[2]}]"
    return f"write {AXES[word]}" if word in AXES else nearest(word, kinds)


def of_domain(word: str, known: Iterable[str]) -> str | None:
    """For a domain that does not exist."""
    return f"write {DOMAINS[word]}" if word in DOMAINS else nearest(word, known)


def of_function(fn: str, known: Iterable[str]) -> str:
    """For a function that does not exist."""
    return ELSEWHERE.get(fn) or nearest(fn, known) or LACKING


def of_name(name: str, known: Iterable[str]) -> str | None:
    """For a name that nothing declares or assigns."""
    known = list(known)
    if re.match(_KINDS + "$", name):
        return f"a declaration has a colon, such as x: {name}" + (" = 1" if name == "const" else "")
    if name[-1] == "T" and name[:-1] in known:
        return f"a transpose is {name[:-1]}.T"
    if re.fullmatch(r"S_\w+|S\d+", name):
        return "S on the right of `=` is the state before the line"
    if name == "e":
        return "assign it first; the exponential is exp(x)"
    if name in reserved.LANGUAGE:
        return f"`{name}` is {reserved.LANGUAGE[name]}, which a spec does not see"
    declared = None if reserved.why(name, an_input=True) else f"declare it, such as {name}: scalar"
    return nearest(name, known) or declared


def of_expression(e: ast.expr) -> str | None:
    """For what Python reads and a spec does not have."""
    match e:
        case ast.Subscript():
            return ONE_TOKEN
        case ast.Call(func=ast.Attribute() as method) if (hint := of_expression(method)) is not None:
            return hint
        case ast.Attribute(value=value, attr="T" | "mT" | "t" | "transpose"):
            return f"a transpose is {source(value)}.T"
        case ast.Call(func=ast.Attribute(value=value, attr=fn), args=args) if fn in FUNCTIONS:
            return f"write {fn}({', '.join(map(ast.unparse, args or [value]))})"
        case ast.Call(func=ast.Attribute(attr=fn)):
            return ELSEWHERE.get(fn, LACKING)
        case ast.BinOp(op=ast.BitXor()):
            return "a power is x ** 2, a transpose x.T"
        case ast.BinOp(op=ast.FloorDiv() | ast.Mod()):
            return "a comment starts with `#`"
    return None


def of_syntax(row: str, col: int, message: str) -> str | None:
    """For what Python cannot read at this column, from 1, of a row."""
    code = row.split("#")[0].rstrip()
    before, rest = code[: col - 1].rstrip(), code[col - 1 :]
    if rest[:1] in CHARACTERS:
        return f"write `{CHARACTERS[rest[0]]}`"
    if message.startswith("invalid character"):
        return NAMES
    if message == "unexpected indent":
        return SEVERAL_LINES if is_continued(code) else "a line starts at the left margin"
    if re.match(r"\s*[\w']+\s*:[^=]", code):
        return _of_declaration(code, before)
    if is_continued(code) and not message.endswith("never closed"):
        return SEVERAL_LINES
    if re.search(r"\w[_^]\{", code):
        return ONE_TOKEN
    if re.match(r"\s*\w+\s*:=", code):
        return "an equation has a plain `=`"
    if transposed := re.search(r"(\w+|\))(\.T)?$", before) if rest[:1] == "'" else None:
        return f"a transpose is {transposed[1] if transposed[1] != ')' else '(...)'}.T"
    if tex := re.search(r"\\([A-Za-z]+)", code):
        return f"a name is written without a backslash: {tex[1]}"
    if message.startswith("cannot assign"):
        return "the name stands on the left: o = S @ q"
    if "annotated" in message:
        return "one declaration a line"
    if declared := re.match(rf"\s*(\w+)\s+({_KINDS}.*)", code):
        return f"write {declared[1]}: {declared[2]}"
    if message == "invalid decimal literal" or (re.search(r"[\w)\]]$", before) and re.match(r"\w", rest)):
        return PRODUCT
    return None


def _of_declaration(code: str, before: str) -> str | None:
    """For a declaration that Python cannot read."""
    if ":" not in before:
        return NAMES
    if re.match(r"\s*\w+\s*:.*,\s*\w+\s*:", code):
        return "one declaration a line"
    if unclosed := re.match(r"\s*(\w+\s*:\s*\w+)\s*\[\s*([^\]]*)$", code):
        inner = unclosed[2].rstrip(" ,()")
        return f"write {unclosed[1]}" + (f"[{inner}]" if inner else "")
    if bare := re.match(rf"\s*(\w+\s*:\s*{_KINDS})[\s,]+(\w+)$", code):
        return f"a domain stands in brackets: {bare[1]}[{bare[3]}]"
    return "in brackets stands a domain, or an interval such as scalar[0, 1]" if "[" in code else None


def is_continued(code: str) -> bool:
    """Whether a row goes on with the one before it, or on the one behind it."""
    return code.strip()[:1] in tuple("+-*/@") or code[-1:] in tuple("+-*/@=")


def decay(e: ast.expr, node: Node, other: Shape) -> str | None:
    """The advice for a read `S @ x` that meets what only a state meets: `S @ diag(x)` was meant."""
    match e, node:
        case ast.BinOp(left=left, right=right), Binary(op="@", x=Node(shape=("v", "k")), y=Node(shape=("k", "1"))) if other in MATRICES:
            diag = ast.Call(ast.Name("diag"), [right], [])
            meant = ast.unparse(ast.BinOp(left, ast.MatMult(), diag))
            return f"`{ast.unparse(e)}` is a read, a value row; a decay by key channel is {meant}"
    return None


def source(e: ast.expr) -> str:
    """The text of e as a factor."""
    text = ast.unparse(e)
    return text if isinstance(e, ast.Name | ast.Attribute | ast.Call | ast.Constant) else f"({text})"


def flip(e: ast.expr) -> str:
    """The text of the transpose of e."""
    if isinstance(e, ast.BinOp) and isinstance(e.op, ast.MatMult):
        return f"{flip(e.right)} @ {flip(e.left)}"
    return source(e.value) if isinstance(e, ast.Attribute) and e.attr == "T" else source(e) + ".T"


def swap(e: ast.BinOp, op: str) -> str:
    """The text of e with another sign."""
    return f"{source(e.left)} {op} {source(e.right)}"
