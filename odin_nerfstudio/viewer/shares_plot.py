"""How well it went, over the units: what was read early, what was hidden, who waited, and what each rank bears."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from odin_nerfstudio.viewer.colors import PARTS, SPANS
from odin_nerfstudio.viewer.curves import Traces, by_rank, line, ranks_legend, stacked
from odin_nerfstudio.viewer.recording import Recording, UnitFigures
from odin_nerfstudio.viewer.style import INK, colored


def shares_figure(recording: Recording, steps: Sequence[int]) -> go.Figure:
    """Draws how units read their scopes, which share of the communication was hidden, and who waited how long.

    Args:
        recording: of the run.
        steps: S units, ascending.

    Returns:
        Over the units: four parts of the scope that add up to 1 (late ones are those that waited, without
        ``fallback``); the hidden fraction; the exposed wait of each rank, ms.
    """
    units = [recording.unit(step) for step in steps]
    waits = by_rank(units, lambda unit: [1e3 * seconds for seconds in unit.wait])
    names = " ".join(colored(name, PARTS[name]) for name in PARTS)
    return stacked(
        steps,
        [
            (f"Read {names}", ".0%", _parts(units)),
            (f"Communication {colored('hidden', SPANS['hidden'])}", ".0%", _hidden(units)),
            (f"Exposed wait, ms{ranks_legend(recording)}", "~g", waits),
        ],
        ranges={0: [0, 1], 1: [0, 1.02]},
    )


def load_figure(recording: Recording, steps: Sequence[int]) -> go.Figure:
    """Draws what was sent, and what each rank bears.

    Args:
        recording: of the run.
        steps: S units, ascending.

    Returns:
        Over the units: bytes sent by all ranks together; primitives and bytes of memory of each rank.
    """
    units = [recording.unit(step) for step in steps]
    sent = [line("sent", [unit.bytes for unit in units], INK, "%{y:.4~s}B")]
    return stacked(
        steps,
        [
            ("Sent per unit, bytes", "~s", sent),
            (f"Primitives{ranks_legend(recording)}", "~s", by_rank(units, lambda unit: unit.primitives)),
            (f"Memory, bytes{ranks_legend(recording)}", "~s", by_rank(units, lambda unit: unit.memory)),
        ],
    )


def _parts(units: Sequence[UnitFigures]) -> Traces:
    """Early, late, fallback and delayed, as areas one on the other."""
    amounts = {
        "early": [unit.early for unit in units],
        "late": [unit.late - unit.delayed - unit.fallback for unit in units],
        "fallback": [unit.fallback for unit in units],
        "delayed": [unit.delayed for unit in units],
    }
    shares = {
        name: [value / unit.scope if unit.scope else 0.0 for value, unit in zip(values, units, strict=True)]
        for name, values in amounts.items()
    }
    return [
        line(name, values, PARTS[name], "%{y:.2%}")
        | {"stackgroup": "scope", "fillcolor": PARTS[name], "line": {"width": 0}}
        for name, values in shares.items()
    ]


def _hidden(units: Sequence[UnitFigures]) -> Traces:
    return [line("hidden", [unit.hidden for unit in units], SPANS["hidden"], "%{y:.2%}")]
