"""reserved: the names that a spec may not give to its inputs and locals, and why.

An input keeps its name in the emitted code: as an argument of the op, as a pointer in kernels. Names that mean something there already are
refused; tests/test_reserved.py compares this table with what is emitted. What the compiler names itself (a buffer, a local of the
reference) makes way for the spec's names, so `D`, `x1` or `score` are free.
"""

from __future__ import annotations

import builtins
import re

LANGUAGE: dict[str, str] = {
    "S": "the state",
    "o": "the output",
    "I": "the identity matrix",
    "K": "the size of a key row",
    "V": "the size of a value row",
    "B": "the batch size",
    "T": "the number of tokens",
    "H": "the number of heads",
}
# Arguments beside the inputs, now or later, and modules: for inputs and locals alike.
EMITTED = frozenset(
    re.findall(
        r"\w+",
        """
    F INPUTS cu_seqlens functools inf initial_state math mode output_final_state tl torch triton
    """,
    )
)
# Names of op.py and kernels.py beside the inputs there.
BESIDE_INPUTS = frozenset(
    re.findall(
        r"\w+",
        """
    absent across_middle addressable any_steep Argument ARGUMENTS at BK Blocks BV C CACHED card check_arguments check_kernels
    check_number checkpoints choose_blocks chunk_size chunk_sum chunks_a_program configure constants ctx current d_final_state
    d_initial_state d_state d_states decay_span dense device DIRECT do dstate dtype ED FACTS Facts few final_state GROUP group i
    integer_power INTERPRETED is_steep keep kernel kernels Launch launch levels load_row load_rows load_tokens log_decay_finite
    log_decay_floor log_decay_resets M middle_of_block N n_chunks n_pieces new_tiles new_vectors NV on op P passes power PRECISION
    precision programs quotient reference row_tiles scratch segment_sum shape side_of_middle sign SPAN STAGES state states store_row
    store_rows tensors tiles token_steps token_tiles torch_chunk triton_dtype unit_lower_inverse upper_half XD
    """,
    )
)
# b_ a tile, h_ a value of one head, i_ an index, m_ a mask, o_ offsets, p_ a pointer; x_step_t is a stride of x, x_rows its rows.
_LOCAL = re.compile(r"[bhimop]_\w*")
_OF_BUFFER = re.compile(r"(x\d+|score\w*|inverse\d*|decay_\w+|\w+_in|\w+_out|[A-Z]\d*(_before)?|do|d[A-Z]\w*)_(step_[bth]|rows)")


def why(name: str, *, an_input: bool) -> str | None:
    """Why a spec may not use this name; None when it may."""
    if name in LANGUAGE:
        return f"it is {LANGUAGE[name]}"
    if name in EMITTED or name.startswith("_"):
        return "the emitted code uses it"
    if hasattr(builtins, name):
        return "it is a name of Python, which the emitted code uses"
    if an_input and (name in BESIDE_INPUTS or _OF_BUFFER.fullmatch(name)):
        return "the emitted code uses it beside the inputs"
    if an_input and _LOCAL.fullmatch(name):
        return f"names with {name[:2]} are local to the emitted kernels"
    return None


def beside(name: str, inputs: list[str]) -> str | None:
    """Why an input may not have this name beside the other inputs: their gradients and strides are named after them."""
    for other in inputs:
        if name == f"d{other}":
            return f"it is the gradient of `{other}` in the emitted code"
        if re.fullmatch(rf"d?{other}_(step_[bth]|rows)", name):
            return f"it is a stride or the rows of `{other}` or of its gradient in the emitted code"
    return None
