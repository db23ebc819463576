"""Rows to splats and back on CUDA: the kernels of cuda/splat_rows.cu as torch operators."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from odin_nerfstudio import kernels
from odin_nerfstudio.splat.raster.fused.reference import PARAMETERS, Sums
from odin_nerfstudio.splat.raster.protocol import RasterSettings, Rows

_KERNEL = "splat_rows"
_MAX_VIEWS = 64
_SPLAT = 13

_ROWS = ", ".join(f"Tensor {name}" for name in PARAMETERS)
_VIEWS = "int[] offsets, Tensor table, int? sh_degree, bool antialiased, float near, float far, float eps2d"
_SUMS = ", ".join(f"Tensor({letter}!) sum_{name}" for letter, name in zip("abcdef", PARAMETERS, strict=True))
_GRADIENTS = ", ".join(["Tensor"] * len(PARAMETERS))

_library = torch.library.Library("odin_nerfstudio", "FRAGMENT")
_library.define(f"splat_rows_project(Tensor rows, {_VIEWS}, Tensor ids, {_ROWS}) -> (Tensor, Tensor, {_GRADIENTS})")
_library.define(f"splat_rows_pull_back(Tensor grads, Tensor? chosen, {_VIEWS}, {_ROWS}) -> ({_GRADIENTS})")
_library.define(
    "splat_rows_add_pulled_back(Tensor grads, Tensor? chosen, Tensor rows, Tensor words, Tensor prefix, "
    f"{_VIEWS}, {_ROWS}, {_SUMS}, Tensor(g!) active) -> ()"
)


class _Views(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int64), ("offset", ctypes.c_int64 * (_MAX_VIEWS + 1))]


class _Settings(ctypes.Structure):
    _fields_ = [
        ("degree", ctypes.c_int64),
        ("antialiased", ctypes.c_int64),
        ("near", ctypes.c_float),
        ("far", ctypes.c_float),
        ("eps2d", ctypes.c_float),
    ]


def project_rows(
    params: Rows, rows: Tensor, offsets: Sequence[int], table: Tensor, settings: RasterSettings
) -> tuple[Tensor, Rows]:
    """The block (P, 13) and the copies of the rows; see the package's ``project_rows``."""
    _check(params, offsets, settings)
    assert offsets[-1] == len(rows)
    block, *copies = torch.ops.odin_nerfstudio.splat_rows_project(rows, *_views(offsets, table, settings), *params)
    return block, Rows(*copies)


def pull_back_rows(
    values: Rows,
    offsets: Sequence[int],
    table: Tensor,
    settings: RasterSettings,
    grads: Tensor,
    chosen: Tensor | None,
    rows: Tensor | None,
    into: Sums | None,
) -> dict[str, Tensor]:
    """Gradients of the rows; see the package's ``pull_back_rows``."""
    _check(values, offsets, settings)
    assert len(grads) == (offsets[-1] if chosen is None else len(chosen))
    views, fields = _views(offsets, table, settings), values[1:]
    if into is None:
        gradients = torch.ops.odin_nerfstudio.splat_rows_pull_back(grads, chosen, *views, *fields)
        return dict(zip(PARAMETERS, gradients, strict=True))
    assert rows is not None and len(rows) == offsets[-1] and into.active.dtype == torch.bool
    sums = (into.values[name] for name in PARAMETERS)
    places = rows, into.places.words, into.places.prefix
    torch.ops.odin_nerfstudio.splat_rows_add_pulled_back(grads, chosen, *places, *views, *fields, *sums, into.active)
    return into.values


def _check(rows: Rows, offsets: Sequence[int], settings: RasterSettings) -> None:
    if len(offsets) - 1 > _MAX_VIEWS:
        raise ValueError(f"Rows are projected for at most {_MAX_VIEWS} views at once, not {len(offsets) - 1}.")
    terms, needed = rows.features_rest.shape[1] + 1, ((settings.sh_degree or 0) + 1) ** 2
    if not terms >= needed <= 16:
        raise ValueError(f"SH degree {settings.sh_degree} is above 3, or needs more than {terms} coefficients.")


def _views(offsets: Sequence[int], table: Tensor, settings: RasterSettings) -> tuple:
    """The arguments ``_VIEWS`` of the operators."""
    antialiased = settings.mode == "antialiased"
    return offsets, table, settings.sh_degree, antialiased, settings.near, settings.far, settings.eps2d


def _project(rows, offsets, table, sh_degree, antialiased, near, far, eps2d, ids, *params):
    block, copies = _empty_block(rows, table), _empty(rows, (ids, *params))
    if rows.shape[0]:
        structures = _structures(offsets, sh_degree, antialiased, near, far, eps2d)
        _launch("splat_rows_project", rows.shape[0], params, *structures, rows, table, ids, *params, *copies, block)
    return block, *copies


def _pull_back(grads, chosen, offsets, table, sh_degree, antialiased, near, far, eps2d, *values):
    gradients = _empty(grads, values)
    structures = _structures(offsets, sh_degree, antialiased, near, far, eps2d)
    _launch_pull_back(grads, chosen, (None,) * 4, table, structures, values, gradients)
    return gradients


def _add_pulled_back(
    grads, chosen, rows, words, prefix, offsets, table, sh_degree, antialiased, near, far, eps2d, *tensors
):
    values, (*sums, active) = tensors[: len(PARAMETERS)], tensors[len(PARAMETERS) :]
    structures = _structures(offsets, sh_degree, antialiased, near, far, eps2d)
    _launch_pull_back(grads, chosen, (rows, words, prefix, active), table, structures, values, sums)


def _launch_pull_back(grads, chosen, places, table, structures, values, out) -> None:
    if grads.shape[0]:
        arguments = (*structures, chosen, table, grads.contiguous(), *places, *values, *out)
        _launch("splat_rows_pull_back", grads.shape[0], values, grads.shape[1], *arguments)


def _launch(function: str, pairs: int, rows: Sequence[Tensor], *arguments: kernels.Argument) -> None:
    width = 3 * rows[PARAMETERS.index("features_rest")].shape[1]
    kernels.launch(_KERNEL, function, rows[0].device, pairs, width, *arguments)


def _structures(offsets, sh_degree, antialiased, near, far, eps2d) -> tuple[_Views, _Settings]:
    views = _Views(len(offsets) - 1, tuple(offsets))
    return views, _Settings(-1 if sh_degree is None else sh_degree, antialiased, near, far, eps2d)


def _empty_block(rows: Tensor, table: Tensor) -> Tensor:
    return table.new_empty(rows.shape[0], _SPLAT)


def _empty(pairs: Tensor, fields: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One row of each field for each pair."""
    return tuple(field.new_empty(pairs.shape[0], *field.shape[1:]) for field in fields)


def _project_fake(rows, offsets, table, sh_degree, antialiased, near, far, eps2d, ids, *params):
    return _empty_block(rows, table), *_empty(rows, (ids, *params))


def _pull_back_fake(grads, chosen, offsets, table, sh_degree, antialiased, near, far, eps2d, *values):
    return _empty(grads, values)


def _add_pulled_back_fake(*arguments) -> None:
    return None


for _name, _kernel, _fake in (
    ("splat_rows_project", _project, _project_fake),
    ("splat_rows_pull_back", _pull_back, _pull_back_fake),
    ("splat_rows_add_pulled_back", _add_pulled_back, _add_pulled_back_fake),
):
    _library.impl(_name, _kernel, "CUDA")
    _library.impl(_name, _fake, "Meta")
