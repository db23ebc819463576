"""Files that a run leaves for people: whole, or not there at all."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from odin_nerfstudio.errors import UserError


def write_file(path: Path, text: str) -> None:
    """Writes a file beside its place, then moves it there: a reader never sees half of one. Makes its folder.

    Raises:
        UserError: it cannot be written; what stood there before is as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror}); make room, or name another place.") from error
