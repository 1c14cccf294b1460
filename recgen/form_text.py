"""form_text: the text of a NormalForm, in the notation of the equations."""

from __future__ import annotations

import sympy
from sympy import Expr

from recgen.elementwise import AXES, Input
from recgen.form import Event, MicroStep, NormalForm, Read, Row, StateRead, Update

_LAYOUT = {"t": "B,T,H", "k": "K", "v": "V"}


def text(form: NormalForm) -> str:
    """The whole form: inputs, then the micro-steps, or the updates and what stands in the way of micro-steps."""
    out = [f"normal form of {form.name}", ""]
    out += [f"  {i.name + ':':<10} {_layout(i)}" for i in form.inputs] + [""]
    if form.obstacle is not None:
        out += [f"  {line}" for n, u in enumerate(form.updates) for line in _update(n, u, form.name)]
        out += [f"  o = {_row(form.output)}    # {form.name}.rec:{form.output_line}", ""]
        out += [f"  no chunk form: {form.obstacle}    # {form.name}.rec:{form.obstacle_line}"]
        return "\n".join(out)
    for n, s in enumerate(form.steps):
        out += [f"  {line}" for line in _step(n, s, form.name)]
    terms = [_read(r, form) for r in form.reads] + ([] if form.direct == 0 else [str(form.direct)])
    out += [f"  o = {' + '.join(terms) or '0'}    # {form.name}.rec:{form.output_line}"]
    return "\n".join([*out, *_legend(form)])


def _layout(i: Input) -> str:
    if i.axes is None:
        return f"a number, by default {i.default}"
    parts = ([] if "t" in i.axes else ["H"]) + [_LAYOUT[a] for a in AXES if a in i.axes]
    d = i.domain
    bounds = {"real": "", "unit_norm": ", of norm 1"}.get(d.kind, f" in [{d.low:g}, {d.high:g}]")
    return f"[{','.join(parts)}]{bounds}"


def _step(n: int, s: MicroStep, name: str) -> list[str]:
    """S1 = S0 Diag(exp(g)) + ... , one line for each event."""
    kept = {"none": f"S{n}", "scalar": f"{_factor(s)} S{n}", "key": f"S{n} {_factor(s)}"}[s.decay_axis]
    out = [f"S{n + 1} = {kept}    # {name}.rec:{s.line}"]
    for e in s.events:
        out.append(f"     + {_event(n, s, e)}    # {name}.rec:{e.line}")
    return out


def _factor(s: MicroStep) -> str:
    """What the state is multiplied with; exp(log(alpha)) is written alpha."""
    retention = sympy.exp(s.decay)
    return f"Diag({retention})" if s.decay_axis == "key" else _tight(retention)


def _event(n: int, s: MicroStep, e: Event) -> str:
    state = f"S{n}'" if s.decay_axis != "none" and e.read_after else f"S{n}"
    row = [] if e.static == 0 else [str(e.static)]
    if e.read is not None:
        minus = e.read.could_extract_minus_sign()
        read = f"{state} {_tight(-e.read if minus else e.read)}"
        row.append(("- " if minus and row else "-" if minus else "+ " if row else "") + read)
    body = " ".join(row)
    body = f"({body})" if len(row) > 1 or " " in body else body
    late = "" if s.decay_axis == "none" or e.write_after else f" {_factor(s)}"
    return f"{body} {_tight(e.write)}^T{late}"


def _read(r: Read, form: NormalForm) -> str:
    at = next((n for n, s in enumerate(form.steps) if s.decay_axis != "none"), None)
    if at is None:
        state = f"S{r.step}"
    elif r.after_decay:
        state = f"S{r.step}'" if r.step == at else f"S{r.step}"
    else:
        state = f"S{r.step}" if r.step <= at else f"S{r.step}^"
    gain = "" if r.gain == 1 else f"{_tight(r.gain)} * "
    read = f"{state} {_tight(r.query)}"
    return f"{gain}({read})" if gain else read


def _legend(form: NormalForm) -> list[str]:
    """What the marks on a state mean, where they occur."""
    at = next((n for n, s in enumerate(form.steps) if s.decay_axis != "none"), None)
    if at is None:
        return []
    factor = _factor(form.steps[at])
    kept = f"{factor} S{at}" if form.steps[at].decay_axis == "scalar" else f"S{at} {factor}"
    after = any(e.read is not None and e.read_after for e in form.steps[at].events)
    after = after or any(r.after_decay and r.step == at for r in form.reads)
    before = any(not r.after_decay and r.step > at for r in form.reads)
    out = [f"  where S{at}' = {kept}, the state after the decay"] if after else []
    out += [f"  where S{at + 1}^ is S{at + 1} before the decay"] if before else []
    return ["", *out] if out else []


def _update(n: int, u: Update, name: str) -> list[str]:
    terms = []
    for k in u.keeps:
        left = "" if k.value == 1 else f"Diag({k.value}) "
        terms.append(f"{left}S{k.version}" + ("" if k.key == 1 else f" Diag({k.key})"))
    for x, y in u.outers:
        column = [] if y.static == 0 else [str(y.static)]
        column += [_state_read(r, f"S{r.version}^T") for r in y.reads]
        terms.append(f"{_group(_row(x))} {_group(' + '.join(column))}^T")
    first, *rest = terms or ["0"]
    tag = f"    # {name}.rec:{u.line}"
    return [f"S{n + 1} = {first}{tag}"] + [f"     + {t}{tag}" for t in rest]


def _row(x: Row) -> str:
    terms = [] if x.static == 0 else [str(x.static)]
    terms += [_state_read(r, f"S{r.version}") for r in x.reads]
    return " + ".join(terms) or "0"


def _state_read(r: StateRead, state: str) -> str:
    read = f"{state} {_tight(r.vector)}"
    return read if r.gain == 1 else f"{_tight(r.gain)} * ({read})"


def _group(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def _tight(expr: Expr) -> str:
    """The expression, in parentheses unless it is one name or number."""
    return str(expr) if expr.is_Atom or expr.is_Function else f"({expr})"
