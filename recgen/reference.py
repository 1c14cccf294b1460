"""reference: Spec -> the token loop in plain torch, printed from the lines of the spec.

Independent of the normal form on purpose. Rows are columns, [B,H,K,1] and [B,H,V,1], and the state is [B,H,V,K], so that every
line prints as it was written.
"""

from __future__ import annotations

from collections.abc import Iterator

from recgen.elementwise import SIZES, Axis, Input
from recgen.errors import VerifyError
from recgen.spec import STATE, Binary, Call, Eye, Grad, Name, Neg, Node, Number, Spec, Transpose, children, names

_FUNCTIONS = {
    "exp": "torch.exp",
    "log": "torch.log",
    "sqrt": "torch.sqrt",
    "tanh": "torch.tanh",
    "sigmoid": "torch.sigmoid",
    "softplus": "F.softplus",
    "silu": "F.silu",
}
# axes -> how a token's part is cut out, and its shape then
_TOKEN: dict[tuple[Axis, ...], tuple[str, str]] = {
    ("t",): ("[:, {t}, :, None, None]", "[B, H, 1, 1]"),
    ("t", "k"): ("[:, {t}, :, :, None]", "[B, H, K, 1]"),
    ("t", "v"): ("[:, {t}, :, :, None]", "[B, H, V, 1]"),
    (): ("[:, None, None]", "[H, 1, 1]"),
    ("k",): ("[:, :, None]", "[H, K, 1]"),
    ("v",): ("[:, :, None]", "[H, V, 1]"),
}
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2, "@": 2, "**": 4}


def reference_source(spec: Spec) -> str:
    """The source of `reference_<name>`; it needs torch, and torch.nn.functional as F.

    The function computes in fp64 when an input is fp64 and in fp32 otherwise. o has the dtype of the value input; the state,
    [B,H,K,V] outside, has that of the computation.
    """
    return _Printer(spec).source()


class _Printer:
    """The text of one reference function, with names that do not clash with the spec's."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.tensors = [i for i in spec.inputs if i.axes is not None]
        self.taken = {i.name for i in spec.inputs} | {n.target for n in spec.lines}
        self.t, self.x, self.dtype, self.device = (self.fresh(n) for n in ("t", "x", "dtype", "device"))
        self.o_dtype, self.outputs, self.eye_k, self.eye_v = (self.fresh(n) for n in ("o_dtype", "outputs", "I_k", "I_v"))
        rebound = {n.target for n in spec.lines}
        # What changes from token to token, or is bound anew in one, keeps its whole under another name.
        self.whole = {i.name: self.fresh(f"{i.name}_all") for i in spec.inputs if (i.axes and "t" in i.axes) or i.name in rebound}
        self.numbers = {i.name for i in spec.inputs if i.axes is None} | set(SIZES)  # names that hold Python numbers

    def fresh(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def source(self) -> str:
        """The function."""
        keywords = [f"{i.name}=None" for i in self.spec.inputs if i.axes is None]
        keywords += ["initial_state=None", "output_final_state=False"]
        head = f"def reference_{self.spec.name}({', '.join(i.name for i in self.tensors)}, *, {', '.join(keywords)}):"
        doc = f'"""{self.spec.name}.rec, token by token, in fp64 when an input is fp64 and in fp32 otherwise."""'
        body = [doc, *self.sizes(), *self.convert(), *self.loop(), *self.finish()]
        return "\n".join([head, *("    " + x for x in body)]) + "\n"

    def first(self, axis: Axis) -> Input:
        """The first input along an axis; one with a time axis where there is one."""
        along = [i for i in self.tensors if i.axes and axis in i.axes]
        return next((i for i in along if i.axes and "t" in i.axes), along[0])

    def sizes(self) -> list[str]:
        """Sizes, dtypes, and the consts."""
        timed, value = self.first("t"), self.first("v")
        every = ", ".join(i.name for i in self.tensors)
        out = [
            f"B, T, H = {timed.name}.shape[:3]",
            f"K, V = {self.first('k').name}.shape[-1], {value.name}.shape[-1]",
            f"{self.o_dtype}, {self.device} = {value.name}.dtype, {value.name}.device",
            f"{self.dtype} = torch.float64 if any({self.x}.dtype == torch.float64 for {self.x} in ({every},)) else torch.float32",
        ]
        for name, default in self.spec.consts:
            out.append(f"{self.whole.get(name, name)} = {self.text(default)} if {name} is None else {name}")
        return out

    def convert(self) -> list[str]:
        """Inputs in the dtype of the computation, the state as value x key."""
        out = []
        for i in self.tensors:
            part, shape = _TOKEN[i.axes or ()]
            whole = i.name in self.whole
            out.append(f"{self.whole.get(i.name, i.name)} = {i.name}.to({self.dtype})" + ("" if whole else f"{part}  # {shape}"))
        used = {n.shape[0] for line in self.spec.lines for n in _walk(line.value) if isinstance(n, Eye)}
        for dim, name, size in (("k", self.eye_k, "K"), ("v", self.eye_v, "V")):
            if dim in used:
                out.append(f"{name} = torch.eye({size}, dtype={self.dtype}, device={self.device})")
        return [
            *out,
            "if initial_state is None:",
            f"    S = torch.zeros(B, H, V, K, dtype={self.dtype}, device={self.device})",
            "else:",
            f"    S = initial_state.to({self.dtype}).mT  # [B, H, V, K]",
        ]

    def loop(self) -> list[str]:
        """The lines of the spec, for each token."""
        out = [f"{self.outputs} = []", f"for {self.t} in range(T):"]
        for i in self.spec.inputs:
            if i.name in self.whole:
                part, shape = ("", "a number") if i.axes is None else _TOKEN[i.axes]
                out.append(f"    {i.name} = {self.whole[i.name]}{part.format(t=self.t)}  # {shape}")
        for line in self.spec.lines:
            out.append(f"    {line.target} = {self.text(line.value)}  # {self.spec.name}.rec:{line.line}")
            if self.is_number(line.value):
                self.numbers.add(line.target)
            else:
                self.numbers.discard(line.target)
        return [*out, f"    {self.outputs}.append(o.expand(B, H, V, 1).squeeze(-1))"]

    def finish(self) -> list[str]:
        """What is returned."""
        return [
            f"o = torch.stack({self.outputs}, dim=1) if T else S.new_zeros(B, 0, H, V)  # [B, T, H, V]",
            f"return o.to({self.o_dtype}), S.mT.contiguous() if output_final_state else None",
        ]

    # expressions

    def is_number(self, node: Node) -> bool:
        """Whether node is a Python number rather than a tensor."""
        return names(node) <= self.numbers and not any(isinstance(n, Eye) for n in _walk(node))

    def text(self, node: Node) -> str:
        """node in torch."""
        return self.bound(node)[0]

    def bound(self, node: Node) -> tuple[str, int]:
        """The text of node, and how strongly its outermost operator binds."""
        match node:
            case Number(value=value):
                return repr(value), 9
            case Name(name=name):
                return name, 9
            case Eye():
                return (self.eye_k if node.shape[0] == "k" else self.eye_v), 9
            case Neg(x=x):
                return "-" + self.paren(x, 3), 3
            case Transpose(x=x):
                return self.paren(x, 9) + ".mT", 9
            case Binary(op=op, x=x, y=y):
                b = _BINDING[op]
                left, right = (5, 3) if op == "**" else (b, b + 1)
                return f"{self.paren(x, left)} {op} {self.paren(y, right)}", b
            case Grad(objective=objective):
                return f"torch.func.grad(lambda S: ({self.text(objective)}).sum())(S)", 9
            case Call(fn=fn, args=args):
                return self.call(fn, args)
        raise VerifyError(f"no torch text for {node}")

    def call(self, fn: str, args: tuple[Node, ...]) -> tuple[str, int]:
        """A function; sums run over the row, which is the axis before the last."""
        x = args[0]
        match fn:
            case "dot":
                return f"({self.paren(x, 2)} * {self.paren(args[1], 3)}).sum(-2, keepdim=True)", 9
            case "norm2" if x.shape == STATE:
                return f"{self.paren(x, 9)}.square().sum((-2, -1), keepdim=True)", 9
            case "norm2":
                return f"{self.paren(x, 9)}.square().sum(-2, keepdim=True)", 9
            case "norm":
                return f"{self.paren(x, 9)}.square().sum(-2, keepdim=True).sqrt()", 9
            case "l2norm":
                return f"{self.paren(x, 2)} / ({self.paren(x, 9)}.square().sum(-2, keepdim=True) + 1e-6).sqrt()", 2
        if self.is_number(x):
            return f"{_FUNCTIONS[fn]}(torch.tensor({self.text(x)}, dtype=torch.float64)).item()", 9
        return f"{_FUNCTIONS[fn]}({self.text(x)})", 9

    def paren(self, node: Node, least: int) -> str:
        text, binds = self.bound(node)
        return text if binds >= least else f"({text})"


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for c in children(node):
        yield from _walk(c)
