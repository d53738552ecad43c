"""Fixtures for all tiers."""
