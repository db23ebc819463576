"""Reads the positions of a point cloud from a PLY file (ASCII or binary, either byte order)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from odin_nerfstudio.errors import UserError

TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2", "ushort": "u2",
    "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4", "float": "f4", "float32": "f4",
    "double": "f8", "float64": "f8",
}  # fmt: skip
BYTE_ORDERS = {"binary_little_endian": "<", "binary_big_endian": ">", "ascii": ""}


def read_ply_positions(file: Path) -> NDArray[np.float64]:
    """(N, 3) x, y, z of the vertices; those that are not finite are left out.

    Raises:
        UserError: the file is missing, cut off, or not a PLY file whose first element are vertices with x, y and z.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: the point cloud cannot be read ({error.strerror}).") from error
    head, found, body = data.partition(b"end_header\n")
    if not found:
        head, found, body = data.partition(b"end_header\r\n")
    lines = [line.split() for line in head.decode("ascii", errors="replace").splitlines()]
    try:
        if not found or lines[0] != ["ply"]:
            raise ValueError
        order = BYTE_ORDERS[next(line[1] for line in lines if line[:1] == ["format"])]
        elements = [i for i, line in enumerate(lines) if line[:1] == ["element"]]
        _, kind, number = lines[elements[0]]
        end = elements[1] if len(elements) > 1 else len(lines)
        properties = [line for line in lines[elements[0] : end] if line[:1] == ["property"]]
        columns = [name for _, _, name in properties]
        where = [columns.index(axis) for axis in "xyz"]
        if kind != "vertex":
            raise ValueError
        count = int(number)
        if order:
            layout = np.dtype([(name, order + TYPES[scalar]) for _, scalar, name in properties])
            vertices = np.frombuffer(body, dtype=layout, count=count)
            positions = np.stack([vertices[axis].astype(np.float64) for axis in "xyz"], axis=1)
        else:
            rows = [line.split() for line in body.decode("ascii").splitlines()[:count]]
            positions = np.array([[float(row[i]) for i in where] for row in rows]).reshape(-1, 3)
            if len(positions) != count:
                raise ValueError
    except (ValueError, KeyError, IndexError, StopIteration) as error:
        raise UserError(f"{file}: this is no PLY point cloud with x, y, z vertices, or it is cut off.") from error
    return positions[np.isfinite(positions).all(axis=1)]
