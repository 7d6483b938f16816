"""The launcher behind `hostopt run`: processes, output, signals and restarts."""
