"""Makes ``world`` importable: a deterministic stand-in for systemd, engines and disk, driven by the core's actions."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
