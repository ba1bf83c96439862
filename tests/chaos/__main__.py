"""``python tests/chaos --seed 7``: one history. ``--seeds 1000``: many. See README.md here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sim_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
