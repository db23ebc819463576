"""``python -m odin_nerfstudio.cli.bench`` is ``odin-bench``."""

from odin_nerfstudio.cli.bench import entrypoint

entrypoint()
