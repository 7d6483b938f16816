"""The commands of `hostopt`, one module each."""
