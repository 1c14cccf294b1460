"""What a card can do, as numbers: passed in, never asked for deep inside."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates of one card. bandwidth: bytes/s of a copy, read plus write; matmul: flop/s of large 16-bit products.

    chained: the share of `matmul` that dependent 64-row products reach; lanes: fp32 operations/s; special: exponentials/s;
    barrier: seconds of one exchange between the warps of a program.
    """

    name: str
    multiprocessors: int
    shared_memory: int
    bandwidth: float
    matmul: float
    chained: float
    lanes: float
    special: float
    barrier: float


H200 = Hardware(
    name="H200",
    multiprocessors=132,
    shared_memory=227 * 1024,
    bandwidth=4.3e12,
    matmul=790e12,
    chained=0.43,
    lanes=132 * 128 * 1.75e9,
    special=132 * 16 * 1.75e9,
    barrier=1e-7,
)
