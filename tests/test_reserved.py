"""Names: what a spec may not call its inputs and locals, held against the code that is emitted."""

from __future__ import annotations

import ast

import pytest

from recgen import reserved
from recgen.errors import SpecError
from recgen.parse import parse
from recgen.pipeline import compile_spec
from recgen.resources import Source
from tests.conftest import RunPython

# Inputs that no emitted code has a reason to mention: all else in a function that takes them is its own vocabulary.
SPECS = (
    """
zzq: key
zzk: key[unit_norm]
zzv: value
zzdt: scalar
zzbeta: scalar[unit]
zzA: head
zzD: head[value]
zzG: head[key]
zzscale: const = K ** -0.5

S = exp(-exp(zzA) * softplus(zzdt)) * S
zze = zzbeta * (zzv - S @ zzk)
S = S + zze @ zzk.T
o = zzscale * (S @ (zzq * zzG)) + zzD * zzv
""",
    """
zzq: key
zzk: key
zzw: key
zza: key
zzv: value
zzg: key[log_decay]

o = S @ zzq
S = S @ diag(exp(zzg)) + (S @ zzw) @ zza.T + zzv**5 @ (zzk / norm(zzk)).T
""",
)


@pytest.mark.parametrize("text", SPECS)
def test_no_name_of_the_emitted_code_can_be_an_input(text: str) -> None:
    compiled = compile_spec(Source("zzop", "zzop.rec", text))
    files, inputs = compiled.files, {i.name for i in compiled.normal.inputs}
    assert compiled.schedule is not None
    kernels = (*compiled.schedule.forward, *compiled.schedule.backward)
    buffers = {b.name for kernel in kernels for b in (*kernel.loads, *kernel.stores)}  # they make way where an input has the name
    buffers |= {f"{name}_{what}" for name in buffers for what in ("step_b", "step_t", "step_h", "rows")}
    for file in ("op.py", "kernels.py"):
        for function in ast.walk(ast.parse(files[file])):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} | {
                a.arg for a in ast.walk(function) if isinstance(a, ast.arg)
            }
            if not names & inputs:
                continue
            own = {n for n in names - buffers if "zz" not in n}
            assert {n for n in own if reserved.why(n, an_input=True) is None} <= {"softplus", "tanh", "x"}, function.name


PROBE = "{q}: key\n{k}: key\n{v}: value\n{g}: scalar[log_decay]\nS = exp({g}) * S + {v} @ {k}.T\no = S @ {q}\n"


@pytest.mark.parametrize(
    ("names", "line", "message"),
    [
        ({"q": "C"}, 1, "`C` is reserved: the emitted code uses it beside the inputs"),
        ({"k": "i_t"}, 2, "`i_t` is reserved: names with i_ are local to the emitted kernels"),
        ({"v": "sum"}, 3, "`sum` is reserved: it is a name of Python"),
        ({"g": "mode"}, 4, "`mode` is reserved: the emitted code uses it"),
        ({"q": "score_rows"}, 1, "`score_rows` is reserved: the emitted code uses it beside the inputs"),
        ({"q": "dk"}, 1, "`dk` is reserved: it is the gradient of `k`"),
        ({"v": "k_step_t"}, 3, "`k_step_t` is reserved: it is a stride or the rows of `k`"),
        ({"g": "dv_step_t"}, 4, "`dv_step_t` is reserved: it is a stride or the rows of `v` or of its gradient"),
        ({"g": "do_step_b"}, 4, "`do_step_b` is reserved: the emitted code uses it beside the inputs"),
        ({"k": "softplus"}, 2, "`softplus` is reserved: it is a function"),
    ],
)
def test_a_reserved_input_is_refused_where_it_is_declared(names: dict[str, str], line: int, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(PROBE.format(**({n: n for n in "qkvg"} | names)), "probe.rec", "probe")
    assert (caught.value.line, caught.value.col) == (line, 1)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["kernels", "torch", "launch", "sum", "mode", "b_x"])
def test_a_recurrence_cannot_have_the_name_of_a_module_of_its_package(name: str) -> None:
    with pytest.raises(SpecError, match="is no name for a recurrence"):
        parse(PROBE.format(q="q", k="k", v="v", g="g"), f"{name}.rec", name)


FREE = """
import torch, recgen
text = '''
x: key
D: key[unit_norm]
score: value
decay_in: scalar[log_decay]
U: scalar[unit]
x9: head
size: head[value]
piece: const = K ** -0.5
e = exp(x9) * U
S = exp(decay_in) * S
i = e * (score - S @ D)
S = S + i @ D.T
N = piece * (S @ x)
o = N + size * score
'''
op = recgen.compile(text, name="x_op")
reference = __import__("sys").modules[op.__module__.rpartition(".")[0]].reference_x_op
torch.manual_seed(0)
x, D, score = torch.randn(3, 1, 70, 1, 16)
D = torch.nn.functional.normalize(D, dim=-1)
inputs = [x, D, score, -torch.rand(1, 70, 1), torch.rand(1, 70, 1), torch.rand(1), torch.rand(1, 16)]
inputs = [i.requires_grad_() for i in inputs]

def results(op, inputs, **how):
    o, state = op(*inputs, output_final_state=True, **how)
    return o, state, *torch.autograd.grad(o.square().sum() + state.sum(), inputs)

exact = results(reference, [i.double() for i in inputs])
for mode in ("chunk", "recurrent"):
    for made, true in zip(results(op, inputs, mode=mode), exact, strict=True):
        assert (made - true).norm() <= 1e-5 * true.norm(), mode
"""


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_names_that_the_compiler_gives_itself_are_free(run_python: RunPython, interpreted: str) -> None:
    run_python("-c", FREE, TRITON_INTERPRET=interpreted)
