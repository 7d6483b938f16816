"""Processes beside the ranks that read and prepare data for them."""
