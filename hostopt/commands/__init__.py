"""The commands of `hostopt`."""
