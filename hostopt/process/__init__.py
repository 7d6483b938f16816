"""Processes of this machine: children, descriptors, reports of errors."""
