"""A model's primitives as rows that can be moved, merged and restored: values, moments and statistics together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from odin_nerfstudio.comm.placement import Shard
from odin_nerfstudio.splat.model import OdinSplatfactoModel
from odin_nerfstudio.viewer.heatmap import History

_STATISTIC = "strategy."


def collect(model: OdinSplatfactoModel, history: History | None = None) -> Shard:
    """All that belongs to the primitives of this rank, by name.

    Parameters have their own names, their moments ``<name>.<moment>``, the strategy's statistics ``strategy.<name>``,
    and what was recorded of them ``history.<name>``.
    """
    rows: dict[str, Tensor] = {} if history is None else history.to_rows()
    for name, param in model.gauss_params.items():
        rows[name] = param.detach()
        state = model.optimizers[name].state[param] if name in model.optimizers else {}
        rows |= {f"{name}.{key}": value for key, value in state.items() if key != "step"}
    statistics = model.strategy_state.items()
    rows |= {_STATISTIC + key: value for key, value in statistics if isinstance(value, Tensor)}
    return Shard(model.ids, rows)


def install(model: OdinSplatfactoModel, shard: Shard) -> None:
    """Makes these the primitives of this rank: what :func:`collect` gave, with other rows."""
    for name in list(model.gauss_params):
        old, new = model.gauss_params[name], Parameter(shard.rows[name])
        model.gauss_params[name] = new
        optimizer = model.optimizers.get(name)
        if optimizer is not None:
            state = optimizer.state.pop(old, {})
            moments = {key: shard.rows[f"{name}.{key}"] for key in state if key != "step"}
            optimizer.param_groups[0]["params"] = [new]
            optimizer.state[new] = {**state, **moments}
    for key, value in model.strategy_state.items():
        if isinstance(value, Tensor):
            model.strategy_state[key] = shard.rows[_STATISTIC + key]
    model.set_ids(shard.ids, model.next_id, model.total)


def to_checkpoint(state: dict[str, Any], merged: Shard, step: int) -> dict[str, Any]:
    """A checkpoint of the whole scene from one of a single shard, by putting the merged rows in their places.

    What was recorded of primitives stands beside their parameters, where every tool that loads the model finds it;
    splatfacto passes over it.
    """
    rows = merged.rows
    whole = {**state, "pipeline": dict(state["pipeline"]), "optimizers": dict(state["optimizers"])}
    for name in (key for key in rows if "." not in key):
        whole["pipeline"][f"_model.gauss_params.{name}"] = rows[name]
        saved = state["optimizers"][name]
        moments = {key: rows.get(f"{name}.{key}", value) for key, value in saved["state"].get(0, {}).items()}
        whole["optimizers"][name] = {**saved, "state": {0: moments} if moments else {}}
    history = {name: row for name, row in rows.items() if name.startswith(History.PREFIX)}
    for name, value in {**history, f"{History.PREFIX}step": torch.tensor(step)}.items():
        whole["pipeline"][f"_model.{name}"] = value
    whole["strategy"] = {key: rows.get(_STATISTIC + key, value) for key, value in state["strategy"].items()}
    whole["ids"] = {**state["ids"], "ids": merged.ids}
    return whole


def from_checkpoint(state: Mapping[str, Any], keep: Tensor) -> dict[str, Any]:
    """The part of a checkpoint that belongs to the rows ``keep`` ((N,) bool), in the same form.

    Its ``ids`` are the arguments of :meth:`OdinSplatfactoModel.set_ids`.
    """
    part = {**state, "pipeline": dict(state["pipeline"]), "optimizers": dict(state["optimizers"])}
    for key in (key for key in part["pipeline"] if ".gauss_params." in key):
        part["pipeline"][key] = state["pipeline"][key][keep]
        name = key.rpartition(".")[2]
        saved = state["optimizers"][name]
        moments = {k: v if k == "step" else v[keep] for k, v in saved["state"].get(0, {}).items()}
        part["optimizers"][name] = {**saved, "state": {0: moments} if moments else {}}
    strategy = state.get("strategy", {})
    part["strategy"] = {key: value[keep] if isinstance(value, Tensor) else value for key, value in strategy.items()}
    count = len(keep)
    ids = state.get("ids", {"ids": torch.arange(count), "next_id": count})
    part["ids"] = {**ids, "ids": ids["ids"][keep], "total": count}
    return part
