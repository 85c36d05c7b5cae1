"""Matrix products with float32 sums that also hold in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies the bits of bfloat16 numbers as if they were integers.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit  # type: ignore[untyped-decorator]
def dot(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a @ b in float32; float32 operands keep all their bits."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")
