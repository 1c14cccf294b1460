"""The chunked op in plain torch, printed from the forward nodes of the tile graph. Part of emit.

What one token's inputs decide is computed on [B, T, H, ...] and then cut into chunks, [B, H, N, C, ...], with zeros behind the last token:
a zero row writes nothing and decays nothing. What does not depend on the state is computed for all chunks at once, and a loop over the
chunks carries the state, [B * H, V, K]; what only the output needs is computed afterwards, again for all chunks at once. A long sequence
goes in pieces that fit a cache.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import inlined
from .lower_torch import AFTER, CHUNK, LOOP, TILE, TOKEN, TorchLowering
from .ops import Axis
from .tile import TileGraph

INDENT = "    "
TOKENS = 4096  # tokens of all heads that are worked on together
KEY_CHUNK = 32  # tokens a chunk with a decay per channel: a size less is cheaper than fewer chunks


@dataclass(frozen=True, slots=True)
class TorchText:
    """`torch_chunk_<name>` in ready lines."""

    name: str
    tensors: tuple[str, ...]
    consts: tuple[str, ...]
    chunk: int
    split: tuple[str, ...]  # lines: sizes, dtypes, and the pieces of a long sequence
    body: tuple[str, ...]  # lines: one piece
    helpers: tuple[str, ...]


@dataclass(slots=True)
class _Function(TorchLowering):
    """The values in their places, as the lines of a function."""

    def text(self) -> TorchText:
        """Values on demand from the output and the next state, then everything in its place."""
        form = self.tile.form.normal
        self.taken |= {i.name for i in form.inputs} | {"B", "T", "H", "K", "V", "S", "o", "F", "torch", "initial_state"}
        names = {name: self.fresh(name) for name in ("N", "C", "dtype", "device", "o_dtype", "piece", "outputs")}
        self.place()
        state = self.bind(self.value(self.tile.state, LOOP), 0)
        output = self.bind(self.value(self.tile.output, AFTER), 0)
        self.ends = (state, output)
        split, head = self._heads()
        lines = [*head, *self._chunks(), *self._loop(state), *self._after(output)]

        def local(match: re.Match[str]) -> str:
            """A local of the template, or a value that the graph has no name for."""
            if match.group(1) not in names:
                names[match.group(1)] = self.fresh(match.group(1).rstrip("0123456789"))
            return names[match.group(1)]

        body, split = ([re.sub(r"\$(\w+)", local, line) for line in part] for part in (lines, split))
        functions = inlined.functions("torch_primitives")
        used = {h for h in functions if any(f"{h}(" in line for line in (*split, *body))}
        used |= {h for h in functions for u in used if f"{h}(" in functions[u]}
        sources = tuple(source for h, source in functions.items() if h in used)
        tensors = tuple(i.name for i in form.inputs if i.axes is not None)
        consts = tuple(i.name for i in form.inputs if i.axes is None)
        return TorchText(form.name, tensors, consts, self.size, tuple(split), tuple(body), sources)

    def _heads(self) -> tuple[list[str], list[str]]:
        """How a piece is reached, and its sizes."""
        tensors = [i for i in self.tile.form.normal.inputs if i.axes is not None]

        def along(axis: Axis) -> str:
            found = [i for i in tensors if i.axes and axis in i.axes]
            return next((i for i in found if i.axes and "t" in i.axes), found[0]).name

        every = ", ".join(i.name for i in tensors)
        timed = [i.name for i in tensors if i.axes and "t" in i.axes]
        pieces = ", ".join(f"{name}.split($piece, 1)" for name in timed)
        consts = "".join(f", {i.name}={i.name}" for i in self.tile.form.normal.inputs if i.axes is None)
        split = [
            f"B, T, H = {along('t')}.shape[:3]",
            f"K, V = {along('k')}.shape[-1], {along('v')}.shape[-1]",
            f"$o_dtype, $device = {along('v')}.dtype, {along('v')}.device",
            f"$dtype = torch.float64 if any(x.dtype == torch.float64 for x in ({every})) else torch.float32",
            f"{every} = (x.to($dtype) for x in ({every}))",
            "if initial_state is None:",
            f"{INDENT}S = torch.zeros(B * H, V, K, dtype=$dtype, device=$device)",
            "else:",
            f"{INDENT}S = initial_state.to($dtype).mT.flatten(0, 1)  # [B * H, V, K]",
            f"$piece = {self.size} * max(1, {TOKENS} // {self.size} // max(1, B * H))  # tokens: what fits a cache",
            "$outputs = []",
            f"for {', '.join(timed)} in zip({pieces}, strict=True):",
            f"{INDENT}o, S = _piece({every}, S{consts})",
            f"{INDENT}$outputs.append(o)",
            "return _tokens($outputs, T).to($o_dtype), S.unflatten(0, (B, H)).mT.contiguous()",
        ]
        head = [
            f"B, T, H = {along('t')}.shape[:3]",
            "V, K = S.shape[1:]",
            "$dtype, $device = S.dtype, S.device",
            f"$C = {self.size}  # tokens a chunk",
            "$N = max(1, -(-T // $C))  # chunks",
        ]
        return split, head

    def _chunks(self) -> list[str]:
        """What does not depend on the state. Inputs are cut into chunks last, under their own names."""
        cut = self._lines(TILE)
        loads = [line for line in cut if re.match(r"(\w+) = _tiles\(\1,", line)]
        return [*self._lines(TOKEN), *(line for line in cut if line not in loads), *loads, *self._lines(CHUNK)]

    def _loop(self, state: str) -> list[str]:
        """The state, from chunk to chunk."""
        lines = [f"{name} = []" for name, _ in self.collected.values()]
        slices = ", ".join(name for name, _ in self.carried.values())
        chunks = ", ".join(f"{self.resolve(source)}.flatten(0, 1).unbind(1)" for _, source in self.carried.values())
        lines.append(f"for {slices} in zip({chunks}, strict=True):" if len(self.carried) > 1 else f"for {slices} in {chunks}:")
        body = [f"{name}.append(S)" for name, inner in self.collected.values() if inner == "S"]
        body += self._lines(LOOP)
        body += [f"{name}.append({self.resolve(inner)})" for name, inner in self.collected.values() if inner != "S"]
        return [*lines, *(INDENT + line for line in (*body, f"S = {self.resolve(state)}  # [B * H, V, K]"))]

    def _after(self, output: str) -> list[str]:
        """The output of all chunks."""
        lines = [f"{name} = torch.stack({name}, 1).unflatten(0, (B, H))  # [B, H, N, ...]" for name, _ in self.collected.values()]
        lines += self._lines(AFTER)
        return [*lines, f"return {self.resolve(output)}, S"]

    def _lines(self, scope: int) -> list[str]:
        return [
            f"{s.name} = {self.words(i)[0]}  # {s.comment}"
            for i, s in enumerate(self.statements)
            if s.scope == scope and not self.inlined(i)
        ]


def torch_text(tile: TileGraph) -> TorchText:
    """`torch_chunk_<name>` of a tile graph."""
    return _Function(tile, KEY_CHUNK if tile.form.decay_axis == "key" else tile.chunk).text()
