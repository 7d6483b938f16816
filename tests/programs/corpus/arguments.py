"""The arguments of the programs in this folder."""

import argparse


def read_arguments(**others):
    """Reads --model-dir, --batch-size, --steps, and other options as `add_argument` takes them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    for name, options in others.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args()
