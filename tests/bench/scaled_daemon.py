"""The daemon in a simulation whose seconds are FACTOR real ones: what policies know of time is the engines' time.

PYTHONPATH=CHECKOUT scaled_daemon.py FACTOR [vllm-supervisord's arguments]
"""

from __future__ import annotations

import functools
import sys
import time

from proxy.server import PublicProxy
from supervisord import app

if __name__ == "__main__":
    factor = float(sys.argv[1])
    app.PublicProxy = functools.partial(PublicProxy, clock=lambda: time.monotonic() / factor)  # type: ignore
    sys.exit(app.main(sys.argv[2:]))
