"""Timelines, trace files and the flight recorder."""
