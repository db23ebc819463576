"""The array type of the demo's ray tracer: float32 for pixels, float64 where subpixel positions are measured."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
