"""Draws the loss and the accuracy of one or more runs of main.py by epoch.

python examples/keras_mnist/plot.py one/history.json two/history.json --output runs.png
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("histories", type=Path, nargs="+", help="history.json of each run")
    parser.add_argument("--output", type=Path, default="runs.png", help="picture to write")
    args = parser.parse_args()

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for file in args.histories:
        history = json.loads(file.read_text())
        for panel, metric in zip(panels, ("loss", "val_accuracy", "lr")):
            values = history["metrics"][metric]
            epochs = range(1, len(values) + 1)
            panel.plot(epochs, values, "o-", label=f"workers: {history['workers']}")
    for panel, title in zip(panels, ("training loss", "test accuracy", "learning rate")):
        panel.set(title=title, xlabel="epoch")
    panels[0].legend()
    figure.savefig(args.output, dpi=72)


if __name__ == "__main__":
    main()
