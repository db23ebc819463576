"""What the user did wrong, as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """A mistake in the input: the message names the file, flag or value and says what to do about it.

    Library code raises it; command lines and nerfstudio's entry points turn it into the sentence alone and a
    non-zero exit through :func:`exit_with_sentence`.
    """


@contextmanager
def exit_with_sentence() -> Iterator[None]:
    """Ends the process with status 1 and the bare message when a :class:`UserError` leaves the block.

    Raises:
        SystemExit: in place of the ``UserError``; Python prints its message to stderr without a traceback.
    """
    try:
        yield
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
