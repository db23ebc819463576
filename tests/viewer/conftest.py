"""Makes the helpers beside the tests importable: pytest's importlib mode leaves ``sys.path`` alone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
