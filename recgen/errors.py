"""The one exception tree of recgen: what a user may catch, and how a mistake in a spec is shown."""

from __future__ import annotations


class RecgenError(Exception):
    """Anything recgen raises on purpose."""


class VerifyError(RecgenError):
    """A stage produced something invalid: a bug of recgen, never of the spec."""


class SpecError(RecgenError):
    """A mistake in a spec, with its place; `str()` is what the user reads.

    line and col count from 1; col points at the first character that is wrong.
    """

    def __init__(
        self,
        path: str,
        line: int,
        col: int,
        message: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        hint: str | None = None,
        source: str = "",
    ) -> None:
        self.path = path
        self.line = line
        self.col = col
        self.message = message
        self.expected = expected
        self.found = found
        self.hint = hint
        self.source = source
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with every field, so that a worker process can hand the error on."""
        return (_rebuild, (self.path, self.line, self.col, self.message, self.expected, self.found, self.hint, self.source))

    def __str__(self) -> str:
        lines = [f"{self.path}:{self.line}:{self.col}: error: {self.message}"]
        if self.source:
            text = self.source.rstrip()
            # Tabs stay tabs before the caret, or the caret would not stand below its character.
            lead = "".join("\t" if c == "\t" else " " for c in text[: self.col - 1])
            lines += [f"    {text}", f"    {lead}^"]
        for label, value in (("expected", self.expected), ("found", self.found), ("hint", self.hint)):
            if value is not None:
                lines.append(f"  {label}: {value}")
        return "\n".join(lines)


def _rebuild(
    path: str, line: int, col: int, message: str, expected: str | None, found: str | None, hint: str | None, source: str
) -> SpecError:
    return SpecError(path, line, col, message, expected=expected, found=found, hint=hint, source=source)
