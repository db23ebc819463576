"""What a model gives of one view, some of it only if somebody looks."""

from __future__ import annotations

from collections import UserDict
from typing import Any


class Outputs(UserDict[str, Any]):
    """Values by name. A value that is a function is called when it is asked for first, and replaced by its result.

    A viewer lists every output and shows one, and a second rendering of the scene is too dear to be made for the list.
    """

    def __getitem__(self, name: str) -> Any:
        value = self.data[name]
        if callable(value):
            value = self.data[name] = value()
        return value
