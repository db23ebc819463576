"""``odin-report``: what a run did, on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from odin_nerfstudio.errors import UserError, exit_with_sentence
from odin_nerfstudio.viewer import report, trace


@dataclass(frozen=True)
class ReportCommand:
    """Writes the report of a run from its odin_trace.json: timeline, conflicts, shares, totals, and how to read them.

    The report is one HTML file that opens in any browser, offline too.
    """

    run_dir: tyro.conf.Positional[Path]
    """Folder of the run, the one with its config.yml."""
    output: Path | None = None
    """Where the report goes; odin_report.html in the folder of the run if not given."""

    def run(self) -> None:
        """Writes the file and says where it is.

        Raises:
            UserError: there is no such run, its trace is missing or damaged, or the report cannot be written.
        """
        source = self.run_dir / trace.FILE_NAME
        if not self.run_dir.is_dir():
            raise UserError(f"{self.run_dir}: there is no such folder; give the one with the run's config.yml.")
        if not source.is_file():
            raise UserError(
                f"{source}: there is no such file. Give the folder with the run's config.yml; training writes the "
                "trace there with each checkpoint, and the viewer's tab Odin has a button for it."
            )
        output = self.output or self.run_dir / report.FILE_NAME
        report.write_report(trace.read_trace(source), output, title="/".join(self.run_dir.resolve().parts[1:][-3:]))
        Console().print(f"wrote {output}", highlight=False, soft_wrap=True)


def entrypoint() -> None:
    """The console script."""
    with exit_with_sentence():
        tyro.cli(ReportCommand, prog="odin-report", description=ReportCommand.__doc__).run()


if __name__ == "__main__":
    entrypoint()
