"""Recurrences drawn from the grammar of the specs, as text: what a user could write, not only what the zoo has.

Keys that are read inside a correction have unit norm and strengths lie in (0, 1), so that every drawn recurrence stays bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

SCALAR_GATES = {
    "exp(g) * S": ("g: scalar[log_decay]",),
    "S @ scalar(exp(g))": ("g: scalar[log_decay]",),
    "alpha * S": ("alpha: scalar[unit]",),
    "sigmoid(f) * S": ("f: scalar",),
    "exp(-exp(A) * softplus(dt + bias)) * S": ("A: head", "dt: scalar", "bias: head"),
    "exp(gamma) * S": ("gamma: head[log_decay]",),
    "(1 - lam / 2) * S": ("lam: scalar[unit]",),
}
KEY_GATES = {
    "S @ diag(exp(g))": ("g: key[log_decay]",),
    "S @ diag(alpha)": ("alpha: key[unit]",),
    "S @ diag(sigmoid(f))": ("f: key",),
    "S @ diag(exp(-softplus(f + bias)))": ("f: key", "bias: head[key]"),
    "S @ diag(exp(gamma))": ("gamma: head[key, log_decay]",),
    "S @ diagonal(exp(exp(A) * g))": ("A: head", "g: key[log_decay]"),
}
UNIT_KEYS = {
    "{0}": ("{0}: key[unit_norm]",),
    "l2norm({0})": ("{0}: key",),
    "({0} / norm({0} + 3))": ("{0}: key[unit_norm]",),
}
KEYS = {
    "{0}": ("{0}: key",),
    "(c{0} * {0})": ("{0}: key", "c{0}: scalar[unit]"),
    "(w{0} * {0})": ("{0}: key", "w{0}: head[key]"),
    "(exp(e{0}) * {0})": ("{0}: key", "e{0}: key[-1, 0]"),
    "softplus({0})": ("{0}: key",),
    "l2norm({0})": ("{0}: key",),
}
STRENGTHS = {
    "{0}": ("{0}: scalar[unit]",),
    "sigmoid({0})": ("{0}: scalar",),
    "(1 - exp({0}))": ("{0}: scalar[log_decay]",),
}
VALUES = {
    "v": ("v: value",),
    "silu(v)": ("v: value",),
    "(z * v)": ("v: value", "z: scalar"),
    "(sigmoid(y) * v)": ("v: value", "y: value"),
    "(D * v)": ("v: value", "D: head"),
}
GAINS = {"": (), "scale * ": ("scale: const = K ** -0.5",), "sigmoid(og) * ": ("og: value",), "hg * ": ("hg: head",)}


# Scores of one read, added up with a head's number before some.
TWO_READS = """
q0: key
q1: key
k0: key
k1: key
v: value
g: key[log_decay]
D: head
hg: head

p0 = S @ q0
S = S + v @ k0.T
p1 = S @ q1
S = S @ diag(exp(g))
S = S + (D * v) @ k1.T
o = p0 + hg * p1
"""
# Scores of one read, of which one waits for the norm of a row.
NORMED_READ = """
q: key
p: key
k: key
v: value
g: key[log_decay]

r = S @ l2norm(p)
S = S @ diag(exp(g))
S = S + v @ k.T
o = S @ q + r
"""
# A gradient kernel with more products of cotangents than shared memory holds.
CROWDED = """
q0: key
q1: key
k0: key[unit_norm]
k1: key[unit_norm]
v: value
w: value
g: key[log_decay]
b0: scalar[unit]
b1: scalar[unit]
s: scalar[unit]

p = S @ q1
S = S @ diag(exp(g))
S = S + b0 * (v - S @ k0) @ k0.T
S = S + b1 * (w - S @ k1) @ k1.T
S = S + s * w @ k0.T
o = S @ q0 + p
"""


@dataclass(slots=True)
class Drawn:
    """The declarations and the lines of one spec."""

    draw: st.DrawFn
    declared: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def choose(self, table: dict[str, tuple[str, ...]], name: str = "") -> str:
        """An expression of the table, over inputs called after `name`; its declarations are noted, the first of a name stays."""
        text = self.draw(st.sampled_from(list(table)))
        for declaration in table[text]:
            line = declaration.format(name)
            self.declared.setdefault(line.split(":")[0], line)
        return text.format(name)

    def flip(self) -> bool:
        return self.draw(st.booleans())


@st.composite
def recurrences(draw: st.DrawFn) -> str:
    """The text of a spec."""
    spec = Drawn(draw)
    spec.choose({"v": ("v: value",)})
    kind = draw(st.sampled_from(["none", "scalar", "key"]))
    decay = "" if kind == "none" else spec.choose(SCALAR_GATES if kind == "scalar" else KEY_GATES)
    corrections = draw(st.integers(0, 2))
    lines = _updates(spec, decay, corrections)
    reads = _reads(spec, len(lines))
    output = " + ".join(f"{spec.choose(GAINS)}{name}" for _, name, _ in reads)
    if spec.flip():
        output += " + " + spec.choose({"v * dot(u * q0, kb)": ("u: head[key]", "q0: key", "kb: key"), "skip * v": ("skip: head",)})
    body: list[str] = []
    for at in range(len(lines) + 1):
        body += [f"{name} = S @ {row}" for place, name, row in reads if place == at]
        body += lines[at : at + 1]
    return "\n".join([*spec.declared.values(), "", *body, f"o = {output}"]) + "\n"


def _updates(spec: Drawn, decay: str, corrections: int) -> list[str]:
    """The lines that change the state, in any order."""
    parallel = corrections == 2 and spec.flip()
    rows: list[str] = []  # a unit key, one for both corrections or one each
    for i in range(corrections):
        rows.append(rows[0] if rows and spec.flip() else spec.choose(UNIT_KEYS, f"m{i}"))
    strengths = [spec.choose(STRENGTHS, f"beta{i}") for i in range(corrections)]
    if corrections == 1 and decay and spec.flip():
        k, beta = rows[0], strengths[0]
        product = f"{decay} @ (I - {beta} * {k} @ {k}.T)" if spec.flip() else f"{decay} @ householder({k}, {beta})"
        return [f"S = {product} + {beta} * {spec.choose(VALUES)} @ {k}.T"]
    if parallel:
        terms = [f"{beta} / 2 * (S @ {k}) @ {_written(spec, k, i)}.T" for i, (k, beta) in enumerate(zip(rows, strengths, strict=True))]
        lines = [f"S = {decay or 'S'} - {' - '.join(terms)}"]
    else:
        lines = [_correction(spec, k, beta, i) for i, (k, beta) in enumerate(zip(rows, strengths, strict=True))]
        lines += [f"S = {decay}"] if decay else []
    for i in range(spec.draw(st.integers(0 if corrections and not parallel else 1, 2))):
        lines.append(f"S = S + {spec.choose(VALUES)} @ {spec.choose(KEYS, f'k{i}')}.T")
    lines = spec.draw(st.permutations(lines))
    if not any("v" in line for line in lines):
        lines = [*lines, f"S = S + v @ {spec.choose(KEYS, 'k0')}.T"]
    return list(lines)


def _written(spec: Drawn, k: str, i: int) -> str:
    """Where a correction writes: along its own key, or another."""
    return k if spec.flip() else spec.choose({f"w{i}": ("{0}: key[unit_norm]",)}, f"w{i}")


def _correction(spec: Drawn, k: str, beta: str, i: int) -> str:
    match spec.draw(st.sampled_from(["delta", "householder", "move", "gradient", "channels"])):
        case "delta":
            return f"S = S + {beta} * ({spec.choose(VALUES)} - S @ {k}) @ {k}.T"
        case "householder":
            return f"S = S @ householder({k}, {beta})"
        case "channels":  # has no chunk form
            strength = spec.choose({"{0}": ("{0}: value[unit]",)}, f"bv{i}")
            return f"S = S + {beta} * {strength} * (v - S @ {k}) @ {k}.T"
        case "gradient":
            return f"S = S - {beta} * grad(norm2(S @ {k} - v) / 2, S)"
        case _:
            return f"S = S - {beta} / 2 * (S @ {k}) @ {_written(spec, k, i)}.T"


def _reads(spec: Drawn, count: int) -> list[tuple[int, str, str]]:
    """Up to two reads: before which line, the name, the query."""
    number = spec.draw(st.integers(1, 2))
    return [(spec.draw(st.integers(0, count)), f"p{i}", spec.choose(KEYS, f"q{i}")) for i in range(number)]
