"""Verifiers: from a task and an answer to raw reward components. They run in processes of their own (`pool.py`)."""
