"""parse: what is read, and that every mistake is shown with its place, what was expected, and a hint."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from recgen.elementwise import K, evaluate
from recgen.errors import RecgenError, SpecError, VerifyError
from recgen.normalize import normalize
from recgen.parse import parse
from recgen.zoo import ZOO

SPECS = sorted((Path(__file__).parent.parent / "specs").glob("*.rec"))

HEAD = "q: key\nk: key\nv: value\nbeta: scalar\n"  # lines 1 to 4
REST = "S = S + beta * v @ k.T\no = S @ q\n"


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_zoo_parses(path: Path) -> None:
    spec = parse(path.read_text(), str(path))
    spec.verify()
    assert spec.name == path.stem
    assert spec.doc.splitlines()[0].endswith(".")
    assert any(year in spec.doc for year in ("2020", "2021", "2023", "2024", "2025"))


def test_zoo_is_complete() -> None:
    names = "deltanet dplr gated_deltanet gla kda linear_attention mamba2 retention rwkv6 rwkv7"
    assert [p.stem for p in SPECS] == names.split()


def test_declarations() -> None:
    spec = parse(
        "q: key\nk: key[unit_norm]\nv: value\ng: scalar[log_decay]\nb: scalar[0, 2]\nc: scalar[-1, 1]\na: head\n"
        "u: head[key]\nd: head[value, 0, inf]\nl: head[log_decay]\nw: head[key, log_decay]\nscale: const = K ** -0.5\n"
        "S = exp(g + l) * S @ diag(exp(w)) + (b * c * a * v) @ (u * k).T\no = scale * (S @ q) + d\n"
    )
    by_name = {i.name: i for i in spec.inputs}
    assert " ".join(by_name) == "q k v g b c a u d l w scale"
    axes = {n: i.axes for n, i in by_name.items()}
    assert axes["q"] == ("t", "k") and axes["v"] == ("t", "v") and axes["g"] == ("t",)
    assert axes["a"] == () and axes["u"] == ("k",) and axes["d"] == ("v",) and axes["l"] == () and axes["w"] == ("k",)
    assert axes["scale"] is None and by_name["scale"].default == 1 / sympy.sqrt(K)
    domains = {n: (i.domain.kind, i.domain.low, i.domain.high) for n, i in by_name.items()}
    assert domains["q"] == ("real", -math.inf, math.inf)
    assert domains["k"] == ("unit_norm", -1, 1)
    assert domains["g"] == domains["l"] == domains["w"] == ("log_decay", -math.inf, 0)
    assert domains["b"] == ("interval", 0, 2) and domains["c"] == ("interval", -1, 1) and domains["d"] == ("interval", 0, math.inf)
    assert [i.line for i in spec.inputs] == list(range(1, 13))


def test_text_is_the_spec_again() -> None:
    text = (
        "a: key\nq: key\nk: key\nv: value\nbeta: scalar[0, 2]\nscale: const = K ** -0.5\nk = k / (norm(k) - 1) - -k\n"
        "S = S @ (I - beta * k @ (a - k).T)\nS = S - grad(norm2(S @ k - v) / 2, S)\no = scale * (S @ q)\n"
    )
    spec = parse(text)
    lines = [x.split("    #")[0].strip() for x in str(spec).splitlines()[1:]]
    assert lines == text.splitlines()
    again = parse("\n".join(lines))
    assert normalize(again).canonical() == normalize(spec).canonical()


def test_name_of_a_spec() -> None:
    assert parse(HEAD + REST).name == "recurrence"
    assert parse(HEAD + REST, "some/where/mine.rec").name == "mine"
    assert parse(HEAD + REST, "some/where/mine.rec", "other").name == "other"
    with pytest.raises(SpecError, match="no name for a recurrence"):
        parse(HEAD + REST, name="two words")


def test_zoo_names_are_their_definitions() -> None:
    for signature, body in ZOO.items():
        arguments = [p.strip() for p in signature.split("(")[1][:-1].split(",") if p.strip()]
        declared = "".join(f"{a}: {'scalar' if a == 'beta' else 'key'}\n" for a in arguments if a != "k")
        head = declared + "k: key\nv: value\n"
        by_name = parse(head + f"S = S @ ({signature}) + v @ k.T\no = S @ k\n")
        written = parse(head + f"S = S @ ({body}) + v @ k.T\no = S @ k\n")
        assert normalize(by_name).canonical() == normalize(written).canonical()


# every kind of error: text, line, column, what the message says, what the rest says
ERRORS: list[tuple[str, int, int, str, str]] = [
    (HEAD + "x = (1 +\n", 5, 5, "syntax error: '(' was never closed", "expected: a closing `)`"),
    (HEAD + "x = 1)\n", 5, 6, "syntax error: unmatched ')'", "an equation `S = ...`"),
    ("  q: key\n", 1, 3, "syntax error: unexpected indent", "a line starts at the left margin"),
    ("\0", 1, 1, "null bytes", ""),
    ("q: key\nlambda: key\n", 2, 1, "`lambda` is a keyword of Python", "such as `lam`"),
    ("q: key\nlambda: scalar[log_decay]\nS = exp(lambda) * S\no = S @ q\n", 2, 1, "`lambda` is a keyword of Python", "such as `lam`"),
    ("if = 3\n", 1, 1, "`if` is a keyword of Python", "another name"),
    (HEAD + "S = S + v @ kk.T\n", 5, 13, "unknown name `kk`", "did you mean `k`?"),
    (HEAD + "S = S + v @ e.T\ne = k\n", 5, 13, "unknown name `e`", "assigned on line 6, after this"),
    (HEAD + "x = exp * k\n", 5, 5, "unknown name `exp`", "write exp(...)"),
    (HEAD + "x = sigmod(beta)\n", 5, 5, "unknown function `sigmod`", "did you mean `sigmoid`?"),
    (HEAD + "x = houseolder(k, beta)\n", 5, 5, "unknown function `houseolder`", "did you mean `householder`?"),
    (HEAD + "x = beta(v - k)\n", 5, 5, "unknown function `beta`", "a product is written with `*`"),
    (HEAD + "S = S @ householder(k)\n", 5, 9, "`householder` takes 2 arguments", "householder(k, beta) = I - beta * k @ k.T"),
    (HEAD + "x = exp(k, k)\n", 5, 5, "`exp` takes 1 argument", "found: 2 arguments"),
    (HEAD + "x = exp(x=k)\n", 5, 11, "by position", "`x=`"),
    ("q: kye\n", 1, 4, "unknown axis `kye`", "did you mean `key`?"),
    ("q: key[unit_nrm]\n", 1, 8, "unknown domain `unit_nrm`", "did you mean `unit_norm`?"),
    ("u: head[kee]\n", 1, 9, "unknown domain `kee`", "did you mean `key`?"),
    ("b: scalar[unit_norm]\n", 1, 11, "only a row can have unit norm", "a scalar"),
    ("b: scalar[2, 1]\n", 1, 11, "an empty interval", "low < high"),
    ("b: scalar[0, nan]\n", 1, 14, "an interval has two numbers", "`nan`"),
    ("q: key\nq: value\n", 2, 1, "`q` is declared twice", "line 1"),
    ("x = 1\nx: key\n", 2, 1, "declared after it was assigned", "declare inputs first"),
    (HEAD + "w: key\n" + REST, 5, 1, "`w` is declared and never used", "remove it"),
    (HEAD + "c: const\n", 5, 1, "the const `c` has no default", "K ** -0.5"),
    (HEAD + "c: const[unit] = 1\n", 5, 10, "a const has no axis and no domain", ""),
    (HEAD + "c: const = beta\n", 5, 12, "`beta` is not known when a const is set", "numbers and the sizes K and V"),
    (HEAD + "c: const = tanh(K)\n", 5, 12, "unknown function `tanh`", "sqrt, exp, log"),
    (HEAD + "w: key = 3\n", 5, 10, "only a const has a default", ""),
    ("S: key\n", 1, 1, "`S` is reserved: it is the state", ""),
    (HEAD + "I = 3\n", 5, 1, "`I` is reserved: it is the identity matrix", ""),
    ("K: scalar\n", 1, 1, "`K` is reserved", ""),
    ("norm: scalar\n", 1, 1, "`norm` is reserved: it is a function", ""),
    ("initial_state: scalar\n", 1, 1, "reserved: the emitted code uses it", ""),
    ("_x: scalar\n", 1, 1, "reserved: the emitted code uses it", ""),
    (HEAD + "S = S + v @ k.T\nx = beta\n", 6, 1, "there is no output", "a read is o = S @ q"),
    (HEAD + "o = beta * (S @ q) + v\n", 5, 1, "the state is never updated", "a write is S = S + v @ k.T"),
    (HEAD + REST + "o = S @ k\n", 7, 1, "the output is assigned twice", "line 6"),
    (HEAD + "o = S @ q\nx = o\n", 6, 5, "`o` cannot be read", "a name of its own"),
    ("k: head[key]\nv: head[value]\nS = S + v @ k.T\no = S @ k\n", 4, 1, "no input has a time axis", "q: key"),
    ("q: key\nS = 2 * S\no = S @ q\n", 3, 1, "no input has a value axis", "v: value"),
    (HEAD + "S += v @ k.T\n", 5, 1, "an equation has a plain `=`", "write S = S + v @ k.T"),
    (HEAD + "S *= v @ k.T\n", 5, 1, "an equation has a plain `=`", "write S = S * (v @ k.T)"),
    (HEAD + "S /= beta\n", 5, 1, "an equation has a plain `=`", "write S = S / beta"),
    (HEAD + "x, y = k, v\n", 5, 1, "one name on its left", "`(x, y) = ...`"),
    (HEAD + "x = y = k\n", 5, 1, "one name on its left", ""),
    (HEAD + "import os\n", 5, 1, "not a statement of a spec", "`import os`"),
    (HEAD + "print(k)\n", 5, 1, "not a statement of a spec", "`print(k)`"),
    (HEAD + "x = [k]\n", 5, 5, "not an expression of a spec", "`[k]`"),
    (HEAD + "x = k if k else v\n", 5, 5, "not an expression of a spec", ""),
    (HEAD + "x = True\n", 5, 5, "not an expression of a spec", ""),
    (HEAD + "x = k.shape\n", 5, 5, "unknown attribute `.shape`", "`.T`, the transpose"),
    (HEAD + "x = k.__class__\n", 5, 5, "unknown attribute `.__class__`", ""),
    (HEAD + "x = q + v\n", 5, 5, "a key row and a value row do not add", "a key row `q` + a value row `v`"),
    (HEAD + "S = S + k @ v.T\n", 5, 5, "one of these is transposed", "the state is value x key: write v @ k.T"),
    (HEAD + "S = k @ v.T + S\n", 5, 5, "one of these is transposed", "the state is value x key: write v @ k.T"),
    (HEAD + "S = k @ v.T\n", 5, 5, "the state is value x key", "transpose it: v @ k.T"),
    (HEAD + "S = S + v @ k\n", 5, 9, "do not multiply", "an outer product is written v @ k.T"),
    (HEAD + "S = S + k @ v\n", 5, 9, "do not multiply", "an outer product is written v @ k.T"),
    (HEAD + "x = q @ k\n", 5, 5, "do not multiply", "an elementwise product is q * k, an inner product is q.T @ k"),
    (HEAD + "x = S @ v\n", 5, 5, "do not multiply", "a value row reads S.T @ v"),
    (HEAD + "x = k @ S\n", 5, 5, "do not multiply", "a key row reads S @ k; a decay by key channel is S @ diag(k)"),
    (HEAD + "x = v @ S\n", 5, 5, "do not multiply", "a value row reads S.T @ v; a decay by value channel is diag(v) @ S"),
    (HEAD + "x = k.T @ S\n", 5, 5, "do not multiply", "a read is S @ k"),
    (HEAD + "x = S @ (v @ v.T)\n", 5, 5, "do not multiply", "on the left of the state"),
    (HEAD + "x = S @ householder(v, beta)\n", 5, 5, "do not multiply", "on the left of the state"),
    (HEAD + "x = beta @ k\n", 5, 5, "`@` between a scalar", "beta * k"),
    (HEAD + "x = k * v\n", 5, 5, "`*` is elementwise", "an outer product is v @ k.T"),
    (HEAD + "x = k * S\n", 5, 5, "`*` is elementwise", "S @ diag(k)"),
    (HEAD + "x = v * S\n", 5, 5, "`*` is elementwise", "diag(v) @ S"),
    (HEAD + "x = (k @ k.T) * (q @ q.T)\n", 5, 5, "`*` is elementwise", "matrices multiply with @"),
    (HEAD + "x = k / v\n", 5, 5, "do not divide", "a row of the same kind"),
    (HEAD + "x = k / 0\n", 5, 9, "division by zero", ""),
    (HEAD + "x = 1 - k @ k.T\n", 5, 5, "a scalar added to a matrix", "`x * I`"),
    (HEAD + "x = k + k.T\n", 5, 5, "one of these is transposed", "write k"),
    (HEAD + "x = 2 * I\n", 5, 5, "nothing here says how large I is", ""),
    (HEAD + "S = beta\n", 5, 5, "the state is value x key", "found: a scalar"),
    (HEAD + "o = S.T @ v\n", 5, 5, "the output is a value row", "found: a key row"),
    (HEAD + "x = exp(k @ k.T)\n", 5, 9, "`exp` of the wrong kind of value", "a key x key matrix"),
    (HEAD + "x = norm(beta)\n", 5, 10, "`norm` of the wrong kind of value", "a key row or a value row"),
    (HEAD + "x = dot(q, v)\n", 5, 5, "`dot` of two different kinds", "two key rows or two value rows"),
    (HEAD + "x = k ** beta\n", 5, 10, "an exponent is a constant number", "`beta`"),
    (HEAD + "x = k * 10 ** 10 ** 10\n", 5, 15, "an exponent is a constant number", "from -64 to 64"),
    (HEAD + "x = 1e400\n", 5, 5, "too large", ""),
    (HEAD + "x = " + "9" * 400 + "\n", 5, 5, "too large", ""),
    (HEAD + "x = " + " + ".join(["k"] * 2000) + "\n", 5, 5, "nested too deeply", "give a part of it a name"),
    (HEAD + "S = exp(S)\n", 5, 5, "not linear in the state S", "`exp(S)`"),
    (HEAD + "S = S @ S\n", 5, 5, "not linear in the state S", "`S @ S`"),
    (HEAD + "x = (S @ k) * (S @ k)\n", 5, 5, "not linear in the state S", "both factors read S"),
    (HEAD + "e = S @ k\nx = e * e\n", 6, 5, "not linear in the state S", "`e * e`"),
    (HEAD + "x = dot(S @ k, S @ q)\n", 5, 5, "not linear in the state S", "both factors read S"),
    (HEAD + "x = v / (S @ k)\n", 5, 10, "not linear in the state S", "below a fraction"),
    (HEAD + "x = (S @ k) ** 2\n", 5, 6, "not linear in the state S", "a power of the state"),
    (HEAD + "x = norm2(S @ k - v)\n", 5, 5, "not linear in the state S", "grad(norm2(S @ k - v) / 2, S)"),
    (HEAD + "S = S @ diag(S.T @ v)\n", 5, 14, "`diag` of something that reads the state", "`S.T @ v`"),
    (HEAD + "S = S - grad(norm2(S @ k - v), k)\n", 5, 32, "with respect to the state", "found: `k`"),
    (HEAD + "S = S - grad(S @ k - v, S)\n", 5, 14, "an objective is a scalar", "a value row"),
    (HEAD + "S = S - grad(beta, S)\n", 5, 14, "does not depend on S", ""),
    (HEAD + "S = S - grad(exp(norm2(S @ k)), S)\n", 5, 14, "not linear in the state S", ""),
    (HEAD + "S = S - grad(dot(v, S @ k) * dot(v, S @ k), S)\n", 5, 14, "at most quadratic", ""),
    (HEAD + "e = S @ k - v\nS = S - grad(norm2(e), S)\n", 6, 20, "through the local `e`", "inside grad"),
    ("é: key\nx = é + ü\n", 2, 9, "unknown name `ü`", "declare it, such as ü: scalar"),
    # what a first spec gets wrong: gates
    (
        HEAD + "S = S @ exp(k) + v @ k.T\n",
        5,
        5,
        "a row added to a matrix",
        "`S @ exp(k)` is a read, a value row; a decay by key channel is S @ diag(exp(k))",
    ),
    (HEAD + "S = beta * S @ k\n", 5, 5, "the state is value x key", "a decay by key channel is beta * S @ diag(k)"),
    (HEAD + "S = S @ k @ (I - k @ k.T)\n", 5, 5, "do not multiply", "a decay by key channel is S @ diag(k)"),
    (HEAD + "S = diag(k) @ S\n", 5, 5, "do not multiply", "key x key matrices on the right: S @ diag(k)"),
    (HEAD + "S = (I - beta * k @ k.T) @ S\n", 5, 5, "do not multiply", "S @ (I - beta * k @ k.T)"),
    (HEAD + "S = S @ exp(diag(k))\n", 5, 13, "`exp` of the wrong kind of value", "hint: write diag(exp(k))"),
    (HEAD + "S = S @ diag(k @ k.T)\n", 5, 14, "`diag` of the wrong kind of value", "diag(x) = x * I"),
    (HEAD + "S = S * k.T\n", 5, 5, "`*` is elementwise", "scale the key axis with S @ diag(k)"),
    (HEAD + "S = S @ (I - beta * k)\n", 5, 10, "a row added to a matrix", "the diagonal matrix of a row is diag(beta * k)"),
    (HEAD + "S = S @ beta\n", 5, 5, "`@` between a scalar", "S * beta"),
    (HEAD + "D: head[value]\no = S @ q + D @ v\n", 6, 13, "do not multiply", "an elementwise product is D * v"),
    # functions of the state
    (
        HEAD + "S = sigmoid(S)\n",
        5,
        5,
        "not linear in the state S",
        "a recurrence is linear in its state: an input may gate it, sigmoid(x) * S",
    ),
    (HEAD + "S = S / norm(S)\n", 5, 9, "not linear in the state S", "normalise keys, k = l2norm(k)"),
    (HEAD + "o = tanh(S @ q)\n", 5, 5, "not linear in the state S", "apply tanh to the output, after the op"),
    (HEAD + "S = relu(k) * S\n", 5, 5, "unknown function `relu`", "computed before the op and declared as an input"),
    (HEAD + "o = S(q)\n", 5, 5, "unknown function `S`", "a read is S @ q"),
    (HEAD + "S = S + outer(v, k)\n", 5, 9, "unknown function `outer`", "an outer product is v @ k.T"),
    (HEAD + "S = torch.exp(beta) * S\n", 5, 5, "not an expression of a spec", "hint: write exp(beta)"),
    (HEAD + "S = beta.exp() * S\n", 5, 5, "not an expression of a spec", "hint: write exp(beta)"),
    (HEAD + "o = dot(S, q)\n", 5, 5, "`dot` of two different kinds", "a read is S @ q"),
    (HEAD + "S = S + dot(k, v)\n", 5, 9, "`dot` of two different kinds", "an outer product is v @ k.T"),
    # transposes and outer products
    (HEAD + "S = S + k.T @ v\n", 5, 9, "do not multiply", "an outer product is written v @ k.T"),
    (HEAD + "S = S + v.T @ k\n", 5, 9, "do not multiply", "an outer product is written v @ k.T"),
    (HEAD + "S = S + v.T @ k.T\n", 5, 9, "do not multiply", "an outer product is written v @ k.T"),
    (HEAD + "S = S + k.T @ v.T\n", 5, 9, "do not multiply", "an outer product is written v @ k.T"),
    (HEAD + "x = q.T @ k.T\n", 5, 5, "do not multiply", "an inner product is q.T @ k"),
    (HEAD + "S = S + v * k.T\n", 5, 9, "`*` is elementwise", "an outer product is v @ k.T"),
    (HEAD + "x = I - k * k.T\n", 5, 9, "`*` is elementwise", "an outer product is k @ k.T"),
    (HEAD + "o = S.T @ q\n", 5, 5, "do not multiply", "a key row reads S @ q"),
    (HEAD + "S = S + v\n", 5, 5, "a row added to a matrix", "a write is an outer product, v @ k.T"),
    (HEAD + "S = S + 1\n", 5, 5, "a scalar added to a matrix", "a write is an outer product, v @ k.T"),
    (HEAD + "S = S + v @ k.t()\n", 5, 13, "not an expression of a spec", "a transpose is k.T"),
    (HEAD + "S = S + v @ k.t\n", 5, 13, "unknown attribute `.t`", "a transpose is k.T"),
    (HEAD + "S = S + v @ k'\n", 5, 14, "syntax error: unterminated string literal", "a transpose is k.T"),
    (HEAD + "S = S + v @ kᵀ\n", 5, 13, "unknown name `kT`", "a transpose is k.T"),
    (HEAD + "S = S + v @ k⊤\n", 5, 14, "invalid character", "write `.T`"),
    (HEAD + "S = S + v @ k^T\n", 5, 14, "not an expression of a spec", "a power is x ** 2, a transpose x.T"),
    (HEAD + "c: const = K ^ -0.5\n", 5, 14, "not an expression of a spec", "a power is x ** 2"),
    (HEAD + "S = 2 ** beta * S\n", 5, 10, "an exponent is a constant number", "exp(beta * log(2))"),
    # tokens
    (HEAD + "S_t = S_{t-1} + v @ k.T\n", 5, 9, "syntax error", "what one token does, without an index"),
    (HEAD + "S = S[t-1] + v @ k.T\n", 5, 5, "not an expression of a spec", "S on the right of `=` is the state before the line"),
    (HEAD + "S[t] = S + v @ k.T\n", 5, 1, "one name on its left", "without an index"),
    (HEAD + "S = S_prev + v @ k.T\n", 5, 5, "unknown name `S_prev`", "S on the right of `=` is the state before the line"),
    (HEAD + "S_t = S + v @ k.T\no = S_t @ q\n", 5, 1, "the state is never updated", "`S_t` is a local: write S = S + v @ k.T"),
    (HEAD + "h = h + v @ k.T\n", 5, 5, "unknown name `h`", "what goes from token to token is the state S"),
    (HEAD + "S = S + T * v @ k.T\n", 5, 9, "unknown name `T`", "`T` is the number of tokens"),
    (HEAD + "for t in T:\n    S = S\n", 5, 1, "not a statement of a spec", "no loops, conditions or definitions"),
    # the output
    (HEAD + "S = S + v @ k.T\nS @ q\n", 6, 1, "not a statement of a spec", "write o = S @ q"),
    (HEAD + "S = S + v @ k.T\nreturn S @ q\n", 6, 1, "not a statement of a spec", "write o = S @ q"),
    (HEAD + "S = S + v @ k.T\nout = S @ q\nx = beta\n", 6, 1, "there is no output", "`out` is a local: write o = S @ q"),
    (HEAD + "S @ q = o\n", 5, 1, "syntax error: cannot assign", "the name stands on the left"),
    # declarations
    ("q: key[\nk: key\n", 1, 7, "'[' was never closed", "hint: write q: key"),
    ("g: scalar[log_decay\nk: key\n", 1, 10, "'[' was never closed", "hint: write g: scalar[log_decay]"),
    ("g: scalar(log_decay)\n", 1, 4, "unknown axis", "a domain stands in brackets: scalar[log_decay]"),
    ("g: scalar log_decay\n", 1, 11, "syntax error", "a domain stands in brackets: g: scalar[log_decay]"),
    ("g: scalar[0..1]\n", 1, 11, "syntax error", "an interval such as scalar[0, 1]"),
    ("z: value = 3\n", 1, 12, "only a const has a default", "write z: value for a tensor, z: const = 3 for a number"),
    ("q: query\n", 1, 4, "unknown axis `query`", "hint: write key"),
    ("q: [B, T, H, K]\n", 1, 4, "unknown axis `[B, T, H, K]`", "hint: write key"),
    ("A: head[key][log_decay]\n", 1, 4, "unknown axis `head[key][log_decay]`", "hint: write head[key, log_decay]"),
    ("A: param[H]\n", 1, 4, "unknown axis `param`", "hint: write head for one number a head"),
    ("k: key[normalized]\n", 1, 8, "unknown domain `normalized`", "hint: write unit_norm"),
    ("q key\n", 1, 3, "syntax error", "hint: write q: key"),
    ("q = key\n", 1, 5, "unknown name `key`", "a declaration has a colon, such as x: key"),
    ("q, k: key\n", 1, 1, "syntax error", "one declaration a line"),
    ("q: key, k: key\n", 1, 7, "syntax error", "one declaration a line"),
    # lines and signs
    (HEAD + "S = beta S\n", 5, 10, "syntax error: invalid syntax", "a product has a sign"),
    (HEAD + "S = 2S\n", 5, 5, "syntax error: invalid decimal literal", "a product has a sign"),
    (HEAD + "S = S · beta\n", 5, 7, "invalid character", "write `*`"),
    (HEAD + "v₁ = v\n", 5, 2, "invalid character", "a name has letters, digits and _"),
    (HEAD + "S = \\beta S\n", 5, 6, "syntax error", "without a backslash: beta"),
    (HEAD + "S = S +\n    v @ k.T\n", 5, 8, "syntax error: invalid syntax", "several lines stands in parentheses"),
    (HEAD + "S = S\n  + v @ k.T\n", 6, 3, "syntax error: unexpected indent", "several lines stands in parentheses"),
    (HEAD + "S = S\n+ v @ k.T\n", 6, 1, "not a statement of a spec", "several lines stands in parentheses"),
    (HEAD + "S := S + v @ k.T\n", 5, 3, "syntax error", "an equation has a plain `=`"),
    (HEAD + "S <- S + v @ k.T\n", 5, 1, "not a statement of a spec", "an equation has a plain `=`"),
    (HEAD + "S = S // write\n", 5, 7, "not an expression of a spec", "a comment starts with `#`"),
]


@pytest.mark.parametrize(("text", "line", "col", "message", "rest"), ERRORS, ids=[e[3] + "|" + e[0][-24:].strip() for e in ERRORS])
def test_error(text: str, line: int, col: int, message: str, rest: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, "my.rec")
    e = caught.value
    assert (e.line, e.col) == (line, col), str(e)
    assert message in e.message
    assert rest in str(e)
    assert str(e).startswith(f"my.rec:{line}:{col}: error: ")


NOT_REPRESENTED = [
    (HEAD + "S = S + dot(S @ k, v) * beta * v @ k.T\no = S @ q\n", 5, "a single number", "two lines"),
    (HEAD + REST.replace("S @ q", "(I - v @ v.T) @ S @ q"), 6, "mixes the channels", "gain * (S @ q)"),
    (HEAD + REST.replace("S @ q", "sqrt(-2) * (S @ q)"), 6, "not a real number", "division by zero"),
    (HEAD + REST.replace("S @ q", "S @ q / (1 - 1)"), 6, "not a real number", "division by zero"),
    (
        HEAD + "g: scalar[log_decay]\nS = g * S + beta * v @ k.T\no = S @ q\n",
        6,
        "multiplied by `g`, which is never positive",
        "write exp(g)",
    ),
    (HEAD + "g: key[log_decay]\nS = S @ diag(g) + beta * v @ k.T\no = S @ q\n", 6, "multiplied by `g`", "write exp(g)"),
    (HEAD + "g: scalar[log_decay]\nS = exp(-g) * S + beta * v @ k.T\no = S @ q\n", 6, "grows by `exp(-g)`", "<= 0 already: write exp(g)"),
    (
        HEAD + "A: head\nS = exp(exp(A) * softplus(beta)) * S + v @ k.T\no = S @ q\n",
        6,
        "grows by `exp(exp(A)*softplus(beta))`",
        "is at most 0: write exp(-exp(A)*softplus(beta))",
    ),
]


@pytest.mark.parametrize(("text", "line", "message", "hint"), NOT_REPRESENTED)
def test_error_of_normalize(text: str, line: int, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        normalize(parse(text, "my.rec"))
    assert (caught.value.line, caught.value.col) == (line, 1)
    assert message in caught.value.message and hint in (caught.value.hint or "")


def test_error_text() -> None:
    with pytest.raises(SpecError) as caught:
        parse(HEAD + "S = S + k @ v.T", "my.rec")
    assert str(caught.value).splitlines() == [
        "my.rec:5:5: error: one of these is transposed",
        "    S = S + k @ v.T",
        "        ^",
        "  expected: two values of the same kind",
        "  found: a state (value x key) `S` + a transposed state (key x value) `k @ v.T`",
        "  hint: the state is value x key: write v @ k.T",
    ]


def test_error_survives_pickling() -> None:
    with pytest.raises(SpecError) as caught:
        parse("q: kye\n", "my.rec")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_one_exception_tree() -> None:
    assert issubclass(SpecError, RecgenError) and issubclass(VerifyError, RecgenError)


def test_line_ends_and_byte_order_mark() -> None:
    text = HEAD + REST
    plain = normalize(parse(text))
    for other in (text.replace("\n", "\r\n"), "\ufeff" + text):
        assert normalize(parse(other)).canonical() == plain.canonical()


NAMES = ["q", "k", "v", "S", "o", "I", "K", "V", "beta", "g", "key", "value", "scalar", "head", "const"]
FUNCTIONS = ["exp", "norm2", "dot", "grad", "diag", "householder"]
SIGNS = ["=", ":", "+", "-", "*", "/", "@", "**", "(", ")", "[", "]", ".", ".T", ",", "1", "0.5", "-1", "\n"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*NAMES, *FUNCTIONS, *SIGNS]), max_size=25), st.booleans())
def test_bad_text_is_a_spec_error(words: list[str], headed: bool) -> None:
    text = (HEAD if headed else "") + " ".join(words).replace("\n ", "\n")
    try:
        normalize(parse(text))
    except SpecError as e:
        assert 1 <= e.line <= text.count("\n") + 1 and e.col >= 1
        assert str(e)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_a_spec_error(text: str) -> None:
    with pytest.raises(SpecError):
        parse(text)


def test_evaluate_is_for_known_functions_only() -> None:
    with pytest.raises(VerifyError):
        evaluate(sympy.gamma(K), {"K": 3.0}, np)
