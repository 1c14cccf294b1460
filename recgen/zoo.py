"""zoo: the named transitions, each one definition in the language of the specs. To extend the zoo, add a line."""

from __future__ import annotations

# signature -> body. A parameter stands for a scalar, a key row or a value row; `I` takes its size from where it is used.
ZOO: dict[str, str] = {
    "identity()": "I",
    "scalar(x)": "x * I",
    "diagonal(x)": "x * I",
    "diag(x)": "x * I",
    "householder(k, beta)": "I - beta * k @ k.T",
    "dplr(d, a, b)": "diag(d) + a @ b.T",
}
