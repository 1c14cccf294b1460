"""chunk_text: the text of a ChunkForm: its rows, its scores, its equations, and why no exponent is positive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sympy import Symbol

if TYPE_CHECKING:
    from recgen.chunk import ChunkForm, Correction, Output, Reader, Write, Writer


def text(form: ChunkForm, size: int) -> str:
    """The whole form, over chunks of `size` tokens."""
    return _Text(form).whole(size)


def columns(rows: Iterable[Sequence[str]], indent: str = "  ", gap: str = "   ") -> list[str]:
    """Rows of cells as aligned lines."""
    table = [tuple(row) for row in rows]
    widths = [max((len(row[i]) for row in table if i < len(row) - 1), default=0) for i in range(max(map(len, table), default=0))]
    return [indent + gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in table]


class _Text:
    """The names of one form's matrices, and its sections.

    Readers are A (corrections) and Q (outputs), writers W, static rows N, corrected rows U; with several of a kind each has a number.
    """

    def __init__(self, form: ChunkForm) -> None:
        self.form = form
        self.gated = form.decay_axis != "none"
        taken = {i.name for i in form.normal.inputs}
        self.gate = form.decay.name if isinstance(form.decay, Symbol) else next(n for n in ("g", "d", "d_") if n not in taken)
        self.events = form.events

    def whole(self, size: int) -> str:
        """Every section."""
        form = self.form
        out = [f"chunk form of {form.normal.name}: C = {size} tokens at a time", "", *self.legend(), ""]
        if self.gated:
            out += ["the decay", *self.decay(), ""]
        out += ["rows, one a token", *columns(self.rows()), ""]
        scores = columns(self.scores())
        out += [*(["scores, [C, C]", *scores, ""] if scores else []), "equations", *self.equations()]
        if self.gated:
            sign = "so none is positive" if self.form.decays else f"so none is positive where {self.gate} is not"
            out += ["", f"exponents: each is a sum of {self.gate} over tokens, {sign}", *columns(self.exponents())]
        return "\n".join(out)

    @property
    def readers(self) -> list[Reader]:
        return [*(c.reader for c in self.form.corrections), *(o.reader for o in self.form.outputs)]

    # names

    def number(self, event: Correction | Write) -> str:
        return event.name[1:]

    def reader(self, reader: Reader) -> str:
        """A, A1, Q, Q2."""
        return reader.name.capitalize()

    def writer(self, writer: Writer) -> str:
        return writer.name.capitalize()

    def coupling(self, reader: Reader, event: Correction | Write) -> str:
        """L, M or P with the numbers of the reader and of what is written, where there are several."""
        correcting = any(c.reader is reader for c in self.form.corrections)
        letter = "P" if not correcting else "M" if event in self.form.writes else "L"
        return letter + reader.name[1:] + self.number(event)

    def tag(self, line: int) -> str:
        return f"# {self.form.normal.name}.rec:{line}"

    # sections

    def legend(self) -> list[str]:
        out = [("i, j", "tokens of the chunk, 1 to C"), ("S0, S1", "the state at the chunk's start and end, [V, K]")]
        keys = [self.reader(r) for r in self.readers] + [self.writer(e.writer) for e in self.events]
        out.append((", ".join(keys), "key rows, [C, K]: " + self.kinds()))
        values = [f"N{self.number(c)}" for c in self.form.corrections if c.static != 0] + [e.name for e in self.events]
        what = "N static, U corrected" if self.form.corrections else "N written"
        out.append((", ".join([*values, "O"]), f"value rows, [C, V]: {what}, O the output"))
        if self.gated:
            out.append(("~", "with the decay from S0 (of a reader) or up to S1 (of a writer)"))
        return columns(out)

    def kinds(self) -> str:
        kinds = (["A reads for a correction"] if self.form.corrections else []) + (["Q reads for the output"] if self.form.outputs else [])
        return ", ".join([*kinds, "W is written along"])

    def decay(self) -> list[str]:
        form, g = self.form, self.gate
        share = "[C, K], one a key channel" if form.decay_axis == "key" else "[C], one a token"
        meaning = "the log of what is kept" if isinstance(form.decay, Symbol) else f"= {form.decay}, the log of what is kept"
        sign = "<= 0" if self.form.decays else "taken to be <= 0, which nothing declares"
        rows: list[tuple[str, ...]] = [(f"{g}_i", f"{meaning}, {sign}; {share}", self.tag(form.decay_line))]
        if all(r.after for r in self.readers) and all(e.writer.after for e in self.events):
            return columns([*rows, (f"G_i = {g}_1 + ... + {g}_i", "the own token's decay included")])
        rows.append((f"G_i  = {g}_1 + ... + {g}_i", "the own token's decay included"))
        return columns([*rows, (f"G'_i = {g}_1 + ... + {g}_{{i-1}}", "the own token's decay left out")])

    def rows(self) -> list[tuple[str, ...]]:
        out: list[tuple[str, ...]] = []
        for c in self.form.corrections:
            out.append((f"{self.reader(c.reader)}_i = {c.reader.vector}", f"what {c.name} reads{self.stands(c.reader)}", self.tag(c.line)))
            if c.static != 0:
                out.append((f"N{self.number(c)}_i = {c.static}", f"the part of {c.name} that reads nothing", self.tag(c.line)))
        for w in self.form.writes:
            out.append((f"{w.name}_i = {w.static}", "what is written", self.tag(w.line)))
        for e in self.events:
            along = f"what {e.name} is written along{self.stands(e.writer)}"
            out.append((f"{self.writer(e.writer)}_i = {e.writer.vector}", along, self.tag(e.line)))
        for o in self.form.outputs:
            reads = f"what the output reads{self.stands(o.reader)}"
            out.append((f"{self.reader(o.reader)}_i = {o.reader.vector}", reads, self.tag(o.line)))
        return out

    def stands(self, row: Reader | Writer) -> str:
        """Where in its token a row reads or writes."""
        if not self.gated:
            return ""
        return ", after the token's decay" if row.after else ", before the token's decay"

    def scores(self) -> list[tuple[str, ...]]:
        out: list[tuple[str, ...]] = []
        for reader, events in self.pairs():
            for e in events:
                own = e.writer.seen_by(reader) == "causal"
                weight = f"exp({_at(reader, 'i')} - {_at(e.writer, 'j')}) " if self.gated else ""
                value = f"{self.coupling(reader, e)}_ij = {self.reader(reader)}_i . {weight}{self.writer(e.writer)}_j"
                seen = "the own token's write is seen" if own else "only earlier tokens' writes are seen"
                out.append((value, "j <= i" if own else "j < i", f"0 elsewhere; {seen}"))
        return out

    def pairs(self) -> list[tuple[Reader, tuple[Correction | Write, ...]]]:
        return [(reader, self.events) for reader in self.readers]

    def equations(self) -> list[str]:
        form, out = self.form, list[str]()
        if len(form.corrections) == 1:
            (c,) = form.corrections
            out += [f"  {c.name} = {' + '.join([*self.right(c), f'{self.coupling(c.reader, c)} {c.name}'])}"]
            out += [f"  {c.name} = (I - {self.coupling(c.reader, c)})^-1 ({' + '.join(self.right(c))})"]
        elif form.corrections:
            for c in form.corrections:
                coupled = [f"{self.coupling(c.reader, d)} {d.name}" for d in form.corrections]
                out.append(f"  {c.name} = {' + '.join([*self.right(c), *coupled])}")
            out.append("  one triangular system, eliminated correction by correction: each diagonal block I - L is unit lower triangular")
        terms = [self.output(gain, [o for o in form.outputs if o.gain == gain]) for gain in dict.fromkeys(o.gain for o in form.outputs)]
        out.append(f"  O = {' + '.join(terms + ([] if form.direct == 0 else [str(form.direct)])) or '0'}")
        kept = {"none": "S0", "scalar": "exp(G_C) S0", "key": "S0 Diag(exp(G_C))"}[form.decay_axis]
        out.append(f"  S1 = {' + '.join([kept, *(f'{e.name}^T {self.mark(self.writer(e.writer))}' for e in self.events)])}")
        return [*out, "", *columns(self.decayed())] if self.gated else out

    def right(self, c: Correction) -> list[str]:
        """What stands on the right of a correction's system."""
        own = [] if c.static == 0 else [f"N{self.number(c)}"]
        return [*own, f"{self.mark(self.reader(c.reader))} S0^T", *(f"{self.coupling(c.reader, w)} {w.name}" for w in self.form.writes)]

    def output(self, gain: object, outputs: list[Output]) -> str:
        terms = [f"{self.mark(self.reader(o.reader))} S0^T" for o in outputs]
        terms += [f"{self.coupling(o.reader, e)} {e.name}" for o in outputs for e in self.events]
        total = " + ".join(terms)
        return total if gain == 1 else f"{gain} * ({total})"

    def mark(self, name: str) -> str:
        """A~1 for A1, where there is a decay."""
        return f"{name[0]}~{name[1:]}" if self.gated else name

    def decayed(self) -> list[tuple[str, ...]]:
        out: list[tuple[str, ...]] = []
        for r in self.readers:
            out.append((f"where {self.mark(self.reader(r))}_i = exp({_at(r, 'i')}) {self.reader(r)}_i",))
        for e in self.events:
            out.append((f"where {self.mark(self.writer(e.writer))}_j = exp(G_C - {_at(e.writer, 'j')}) {self.writer(e.writer)}_j",))
        return out

    def exponents(self) -> list[tuple[str, ...]]:
        """Every exponent as the tokens whose decay it sums, and where it stands."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for reader, events in self.pairs():
            found.setdefault((_at(reader, "i"), "1", _last(reader)), []).append(self.mark(self.reader(reader)))
            for e in events:
                pairs = "j <= i" if e.writer.seen_by(reader) == "causal" else "j < i"
                place = (f"{_at(reader, 'i')} - {_at(e.writer, 'j')}", _first(e.writer), _last(reader))
                found.setdefault(place, []).append(f"{self.coupling(reader, e)} ({pairs})")
        for e in self.events:
            place = (f"G_C - {_at(e.writer, 'j')}", _first(e.writer), "C")
            found.setdefault(place, []).append(self.mark(self.writer(e.writer)))
        sums = [(exponent, f"= sum of {self.gate} over {first} .. {last}") for exponent, first, last in found]
        return [(*cells, "in " + ", ".join(where)) for cells, where in zip(sums, found.values(), strict=True)]


def _at(row: Reader | Writer, token: str) -> str:
    return f"G_{token}" if row.after else f"G'_{token}"


def _first(writer: Writer) -> str:
    """The first token whose decay acts on what is written at j."""
    return "j+1" if writer.after else "j"


def _last(reader: Reader) -> str:
    """The last token whose decay has acted on what is read at i."""
    return "i" if reader.after else "i-1"
