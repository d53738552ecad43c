"""Domains, tasks, scores and advantages. Imports `sandboxes` and nothing else of ours."""
