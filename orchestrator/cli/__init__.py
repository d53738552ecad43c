"""The command line. Commands import what they need when they run, so that `--help` answers at once.

Exit codes: 0 success, 1 failed, 2 usage or invalid input, 3 cancelled.
"""

import sys

from orchestrator.cli.app import app
from orchestrator.cli.failures import guarded


def main() -> None:
    """Entry point of `crosstrain`."""
    sys.exit(guarded(app))
