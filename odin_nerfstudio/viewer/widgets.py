"""Elements of the panel that send to the browser only what has changed."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import plotly.graph_objects as go
import viser

from odin_nerfstudio.viewer.style import aspect, empty_figure


class Plot:
    """A figure in the panel."""

    def __init__(self, gui: viser.GuiApi) -> None:
        figure = empty_figure("no unit recorded yet")
        self._handle = gui.add_plotly(figure, aspect(figure))
        self._aspect = aspect(figure)
        self._key: Hashable = None

    def show(self, key: Hashable, draw: Callable[[], go.Figure]) -> None:
        """Draws and sends the figure if it is not the one of this key already."""
        if key == self._key:
            return
        figure = draw()
        self._handle.figure = figure
        if aspect(figure) != self._aspect:
            self._handle.aspect = self._aspect = aspect(figure)
        self._key = key


class Text:
    """A line of markdown in the panel."""

    def __init__(self, gui: viser.GuiApi) -> None:
        self._handle = gui.add_markdown("")

    def show(self, text: str) -> None:
        """Sends the text if it is another one."""
        if text != self._handle.content:
            self._handle.content = text
