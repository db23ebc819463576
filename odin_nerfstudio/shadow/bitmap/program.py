"""How a set is computed from others: a program for a stack of words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

AND, OR, MINUS, FROM = range(4)
"""``FROM`` is ``MINUS`` the other way round: what is below the top is taken from it. The kernel's kAnd and so on."""
SWAPPED = (AND, OR, FROM, MINUS)
"""The operation that gives the same with its operands exchanged."""
LONGEST = 63
"""Instructions that a program may have; its stack is then 6 words high at most, see
:class:`~odin_nerfstudio.shadow.bitmap.Bitmap`."""

Program = Sequence[Tensor | int]
"""A tensor ((W,) int64, contiguous) is put on the stack; an operation replaces the two values on its top by one. What
is left is the set; it is empty if nothing is."""


def operate(operation: int, below: Tensor, top: Tensor) -> Tensor:
    """What an operation makes of two values."""
    if operation == AND:
        return below & top
    if operation == OR:
        return below | top
    return below & ~top if operation == MINUS else top & ~below
