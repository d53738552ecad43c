"""Environments, engines and the episodes between them.

Imports `reward` and `sandboxes`; vLLM in `engines/vllm.py` alone.
"""
