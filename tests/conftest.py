"""Fixtures for all tiers."""

import signal

# A shell without job control starts background commands with SIGINT ignored, and programs inherit that. Tests press
# Ctrl+C on programs they start, so these must get the usual disposition, whoever started the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
