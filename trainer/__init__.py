"""Samples to loss to gradient to new weights. Imports nothing of ours and knows neither domains nor credit."""
