"""chunk: the equations over a chunk are the recurrence: proved in SymPy, and compared in NumPy in every regime of the gate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import sympy

from recgen.chunk import ChunkForm, chunk
from recgen.errors import VerifyError
from recgen.prove import prove, prove_micro_steps
from tests.conftest import ZOO
from tests.stages import K, V, chunk_form, error, form_of, head, normal, regimes, tensors

CASES = [(name, gate) for name in ZOO for gate in regimes(normal(name))]

SPECIAL = {
    "correct_before_the_decay": """
        q: key
        k: key
        v: value
        g: key[log_decay]
        beta: scalar

        S = S + beta * (v - S @ k) @ k.T
        S = S @ diag(exp(g))
        o = S @ q
        """,
    "two_corrections": """
        q: key
        k: key
        m: key
        v: value
        g: scalar[log_decay]

        S = exp(g) * S
        S = S @ (I - k @ k.T) + v @ k.T
        S = S - (S @ m) @ m.T
        o = S @ q
        """,
    "two_reads": """
        q: key
        r: key
        k: key
        v: value
        z: value
        alpha: scalar[unit]

        p = S @ r
        S = alpha * S + v @ k.T
        o = z * (S @ q) + p
        """,
    "no_output_of_the_state": """
        k: key
        v: value
        z: value

        S = S + v @ k.T
        o = z
        """,
}


def special(name: str) -> ChunkForm:
    return chunk(form_of("\n".join(line.strip() for line in SPECIAL[name].strip().splitlines()) + "\n", name))


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_proved(name: str) -> None:
    prove(chunk_form(name))
    prove_micro_steps(normal(name))


@pytest.mark.parametrize("name", SPECIAL)
def test_what_the_zoo_lacks_is_proved(name: str) -> None:
    prove(special(name))
    prove_micro_steps(special(name).normal)


def test_a_longer_chunk_is_proved() -> None:
    prove(chunk_form("kda"), tokens=4, keys=3)


def swap_reader(form: ChunkForm) -> ChunkForm:
    """The output reads before its token's decay."""
    (out,) = form.outputs
    return replace(form, outputs=(replace(out, reader=replace(out.reader, after=not out.reader.after)),))


def blind_output(form: ChunkForm) -> ChunkForm:
    """The output does not see its own token's write."""
    (out,) = form.outputs
    return replace(form, outputs=(replace(out, reader=replace(out.reader, step=0)),))


def swap_correction(form: ChunkForm) -> ChunkForm:
    """The correction predicts before the decay."""
    (c,) = form.corrections
    return replace(form, corrections=(replace(c, reader=replace(c.reader, after=not c.reader.after)),))


def swap_writer(form: ChunkForm) -> ChunkForm:
    """The decay of its own token acts on what is written."""
    (c,) = form.corrections
    return replace(form, corrections=(replace(c, writer=replace(c.writer, after=False)),))


def other_decay(form: ChunkForm) -> ChunkForm:
    return replace(form, decay=2 * form.decay)


def no_static(form: ChunkForm) -> ChunkForm:
    return replace(form, corrections=tuple(replace(c, static=sympy.Integer(0)) for c in form.corrections))


@pytest.mark.parametrize("wrong", [swap_reader, blind_output, swap_correction, swap_writer, other_decay, no_static])
@pytest.mark.parametrize("name", ["gated_deltanet", "kda"])
def test_a_wrong_form_is_refuted(name: str, wrong: object) -> None:
    assert callable(wrong)
    with pytest.raises(VerifyError, match=r"(not the recurrence: [oS]\[\d,\d\] differs by|a positive exponent)"):
        prove(wrong(chunk_form(name)))


def test_a_strict_read_made_causal_is_refuted() -> None:
    """A read before the write that sees it, or a read before the decay that sees what is written after it."""
    form = chunk_form("rwkv6")
    (out,) = form.outputs
    causal = replace(form, outputs=(replace(out, reader=replace(out.reader, step=1)),))
    with pytest.raises(VerifyError, match="a positive exponent"):
        causal.verify()
    with pytest.raises(VerifyError, match="a positive exponent"):
        prove(causal)
    late = replace(form, outputs=(replace(out, reader=replace(out.reader, step=1, after=True)),))
    with pytest.raises(VerifyError, match="differs by"):
        prove(late)


def test_wrong_micro_steps_are_refuted() -> None:
    form = normal("gated_deltanet")
    (step,) = form.steps
    (event,) = step.events
    assert event.read is not None
    wrong = replace(form, steps=(replace(step, events=(replace(event, read=-event.read),)),))
    prove(chunk(wrong))
    with pytest.raises(VerifyError, match="the normal form is not the recurrence"):
        prove_micro_steps(wrong)


def test_a_correction_of_its_own_write_is_refused() -> None:
    form = chunk_form("deltanet")
    (c,) = form.corrections
    wrong = replace(form, corrections=(replace(c, reader=replace(c.reader, step=1)),))
    with pytest.raises(VerifyError, match="reads what it writes itself"):
        wrong.verify()
    with pytest.raises(VerifyError, match="before it is known"):
        prove(wrong)


@pytest.mark.parametrize("T", [1, 2, 37])
@pytest.mark.parametrize(("name", "gate"), CASES)
def test_run_is_the_recurrence(name: str, gate: str | None, T: int) -> None:
    form = normal(name)
    env, S0 = head(form, tensors(form, T, seed=T, gate=gate)), np.random.default_rng(T).normal(size=(V, K))
    o, S = chunk_form(name).run(env, S0)
    exact_o, exact_S = form.run(env, S0)
    assert o.shape == (T, V)
    assert error(o, exact_o) < 1e-10
    assert error(S, exact_S) < 1e-10


@pytest.mark.parametrize("name", SPECIAL)
def test_run_of_what_the_zoo_lacks(name: str) -> None:
    form = special(name)
    env = head(form.normal, tensors(form.normal, 20, gate="mixed"))
    env |= {n: x * 0.3 for n, x in env.items() if n in ("k", "m")}
    S0 = np.random.default_rng(0).normal(size=(V, K))
    o, S = form.run(env, S0)
    exact_o, exact_S = form.normal.run_updates(env, S0)
    assert error(o, exact_o) < 1e-10
    assert error(S, exact_S) < 1e-10


@pytest.mark.parametrize("name", ["retention", "gated_deltanet", "kda", "gla", "rwkv6", "rwkv7", "dplr"])
def test_a_hard_reset_forgets_the_past(name: str) -> None:
    """g = -inf at a token: what comes after does not depend on what came before, and nothing is NaN."""
    form, T, at = normal(name), 12, 5
    gate = next(i for i in form.inputs if i.domain.kind == "log_decay")
    env = head(form, tensors(form, T, gate="-0.5"))
    env[gate.name] = np.array(env[gate.name])
    env[gate.name][at if gate.axes and "t" in gate.axes else ...] = -np.inf
    S0 = np.random.default_rng(1).normal(size=(V, K))
    o, S = chunk_form(name).run(env, S0)
    exact_o, exact_S = form.run(env, S0)
    assert np.isfinite(o).all() and np.isfinite(S).all()
    assert error(o, exact_o) < 1e-12
    assert error(S, exact_S) < 1e-12
    if name not in ("dplr", "rwkv7"):  # these read the state before the decay and carry that on
        assert error(chunk_form(name).run(env, S0 + 1.0)[1], S) < 1e-12


def test_no_gate_equals_the_ungated_spec() -> None:
    form = normal("kda")
    env, S0 = head(form, tensors(form, 9, gate="0")), np.zeros((V, K))
    ungated, _ = chunk_form("deltanet").run({n: x for n, x in env.items() if n != "g"}, S0)
    assert error(chunk_form("kda").run(env, S0)[0], ungated) < 1e-12


def test_the_text_names_every_row_score_and_exponent() -> None:
    text = str(chunk_form("dplr"))
    assert "L11_ij = A1_i . exp(G'_i - G_j) W1_j" in text
    assert "P2_ij = Q_i . exp(G_i - G_j) W2_j" in text
    assert "U1 = (I - L11)^-1 (A~1 S0^T + M12 N2)" in text
    assert "G'_i - G_j   = sum of g over j+1 .. i-1   in L11 (j < i), M12 (j < i)" in text
    assert "exponents" not in str(chunk_form("deltanet"))
    assert "one triangular system" in str(special("two_corrections"))
    assert " + z * (" in str(special("two_reads"))
