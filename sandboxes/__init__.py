"""Isolated machines for episodes. Imports nothing of ours; `docker` is imported in `docker.py` alone."""
