"""Launchers other than `hostopt run`: their environments, and the exchange of addresses."""
