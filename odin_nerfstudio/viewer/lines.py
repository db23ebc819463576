"""Many coloured lines as one object of the scene: viser has none for them, but binary glTF has."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

GL_LINES, GL_FLOAT = 1, 5126
MAGIC, VERSION, JSON_CHUNK, BINARY_CHUNK = 0x46546C67, 2, 0x4E4F534A, 0x004E4942
GAMMA = 2.2
"""glTF's vertex colours are linear."""


def lines_glb(ends: NDArray[np.floating[Any]], colors: NDArray[np.floating[Any]]) -> bytes:
    """A binary glTF of lines without lighting.

    Args:
        ends: (E, 2, 3) of at least one line.
        colors: (E, 3) sRGB in [0, 1].

    Returns:
        What ``viser``'s ``add_glb`` takes.
    """
    points = ends.reshape(-1, 3).astype("<f4")
    shades = np.repeat(colors**GAMMA, 2, axis=0).astype("<f4")
    size, vectors = points.nbytes, {"componentType": GL_FLOAT, "count": len(points), "type": "VEC3"}
    content = {
        "asset": {"version": "2.0"},
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0, "COLOR_0": 1}, "mode": GL_LINES}]}],
        "accessors": [
            {"bufferView": 0, "min": points.min(axis=0).tolist(), "max": points.max(axis=0).tolist(), **vectors},
            {"bufferView": 1, **vectors},
        ],
        "bufferViews": [{"buffer": 0, "byteOffset": n * size, "byteLength": size} for n in range(2)],
        "buffers": [{"byteLength": 2 * size}],
    }
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 4)
    chunks = struct.pack("<II", len(text), JSON_CHUNK) + text
    chunks += struct.pack("<II", 2 * size, BINARY_CHUNK) + points.tobytes() + shades.tobytes()
    return struct.pack("<III", MAGIC, VERSION, 12 + len(chunks)) + chunks
