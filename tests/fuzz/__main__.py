"""Coverage-guided fuzzing of the parsers that strangers reach: `make fuzz`, or `python tests/fuzz TARGET [OPTIONS]`.

Inputs that reach new code are kept in the folder that is named first; those worth keeping for ever are committed in
tests/fuzz/corpus, and `make test` runs the targets over them.
"""

import sys
from pathlib import Path

import atheris

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

with atheris.instrument_imports(include=["proxy"]):
    from targets import TARGETS


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name not in TARGETS:
        sys.exit(f"usage: python tests/fuzz TARGET [OPTIONS of libFuzzer]; targets: {', '.join(TARGETS)}")
    # A merge runs this very command again.
    atheris.Setup([f"{sys.executable} {HERE} {name}", *options], TARGETS[name])
    atheris.Fuzz()


main()
