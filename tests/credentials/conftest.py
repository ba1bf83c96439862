"""Makes ``pki`` importable, the certificates of the proxy's tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "proxy"))
