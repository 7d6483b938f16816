"""Share of the communication that is hidden behind backward, feature by feature."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, network

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
_TIMEOUT_S = 300.0
_CALIBRATIONS = 3
_DRIFT = 0.2  # maximum relative difference of a step from the calibration
_CLOSE = 0.03  # maximum relative difference between ring and backward


@dataclass(frozen=True)
class Variant:
    """One row of the ablation.

    Args:
      title: title of the row.
      one_bucket: True for one bucket with all layers, False for a bucket for each layer.
      communication: transport between the ranks; "shm" does not use the link.
      compression: wire format of the gradients.
    """

    title: str
    one_bucket: bool = False
    communication: str = "grpc+tcp"
    compression: str = "none"


# How forward and backward are computed, by name.
DEVICES = {
    "processor": "Computed on the processor cores that the ring needs as well",
    "accelerator": "A simulated accelerator, which leaves the processor cores idle",
}
VARIANTS = {
    "one bucket": Variant("no overlap: one bucket, over the link", one_bucket=True),
    "buckets": Variant("+ a bucket for each layer, reduced during backward"),
    "bf16": Variant("+ bf16 on the wire", compression="bf16"),
    "shm": Variant("shared memory instead of the link", communication="shm"),
    "shm, one bucket": Variant("shared memory, one bucket", one_bucket=True, communication="shm"),
}


class Bench:
    """Runs ranks in the two namespaces of a link, or side by side.

    Args:
      link: link between the namespaces.
      args: arguments of the benchmark.
      device: one of DEVICES.
    """

    def __init__(self, link: network.Link, args: argparse.Namespace, device: str) -> None:
        self._link = link
        self._args = args
        self._layer_ms = args.layer_ms if device == "accelerator" else 0.0

    @property
    def layer_bytes(self) -> int:
        """Returns the bytes of the gradient of one layer."""
        return 4 * self._args.width**2

    def alone(self, part: str) -> float:
        """Returns milliseconds of a step of two independent workers."""
        with tempfile.TemporaryDirectory() as meeting:
            return self._run(part, {}, self._args.steps, on_link=True, more=["--alone", meeting])

    def together(self, part: str, variant: Variant) -> float:
        """Returns milliseconds of a step of two workers, or of their ring alone."""
        layers = self._args.layers if variant.one_bucket else 1
        environ = {
            "HOSTOPT_BUCKET_MB": str(layers * self.layer_bytes / MIB),
            "HOSTOPT_COMMUNICATION": variant.communication,
            "HOSTOPT_COMPRESSION": variant.compression,
        }
        on_link = variant.communication != "shm"
        return self._run(part, environ, self._args.steps, on_link=on_link)

    def _run(
        self,
        part: str,
        environ: Mapping[str, str],
        steps: int,
        on_link: bool,
        more: list[str] | None = None,
    ) -> float:
        args = self._args
        command = [sys.executable, HERE / "rank.py", "--part", part, "--layers", args.layers]
        command += ["--width", args.width, "--batch", args.batch, "--steps", steps]
        command += ["--layer-ms", self._layer_ms, *(more or [])]
        environ = {**common.SAME_THREADS, "TF_USE_LEGACY_KERAS": "1", **environ}
        if on_link:
            text = self._link.run(command, _TIMEOUT_S, environ)
        else:
            text = common.run(common.hostopt_run(2, *command), _TIMEOUT_S, environ)
        rates = [result["steps_per_s"] for result in common.results_in(text, 2)]
        return 1e3 * len(rates) / sum(rates)


def calibrate(link: network.Link, bench: Bench, gradient_bytes: int) -> dict[str, float]:
    """Sets the rate of the link so that the ring alone takes as long as backward.

    Args:
      link: the link, without a limit.
      bench: runs ranks.
      gradient_bytes: bytes of all gradients of a step.

    Returns:
      Milliseconds of forward, backward and the ring, and the rate in Gbit/s.
    """
    forward_ms = bench.alone("forward")
    backward_ms = bench.alone("backward") - forward_ms
    if backward_ms <= 0:
        raise common.BenchmarkError(
            f"backward takes {backward_ms:.1f} ms: raise --batch or --steps"
        )
    rate_bit_per_s = gradient_bytes * 8 / backward_ms * 1e3
    for _ in range(_CALIBRATIONS):
        link.set_rate(rate_bit_per_s, burst="128kb")
        ring_ms = bench.together("ring", VARIANTS["buckets"])
        attributes = {"forward_ms": forward_ms, "backward_ms": backward_ms, "ring_ms": ring_ms}
        attributes["link_gbit_per_s"] = rate_bit_per_s / 1e9
        common.log(f"calibration: {attributes}")
        if abs(ring_ms / backward_ms - 1) < _CLOSE:
            break
        rate_bit_per_s *= ring_ms / backward_ms
    return attributes


def evaluate(
    actual: Mapping[str, list[dict[str, float]]], alone_ms: float
) -> list[dict[str, Any]]:
    """Evaluates medians of the rounds, and the hidden share.

    Args:
      actual: by variant and round, milliseconds of "step" and, of those that communicate, of
        their "ring" alone.
      alone_ms: milliseconds of a step without communication.

    Returns:
      A row for each variant.
    """
    rows = []
    for name, rounds in actual.items():
        if name == "none":
            continue
        step_ms = common.median([result["step"] for result in rounds])
        ring_ms = common.median([result["ring"] for result in rounds])
        exposed_ms = step_ms - alone_ms
        hidden = 1 - exposed_ms / ring_ms
        row = {"variant": name, "step_ms": step_ms, "communication_ms": ring_ms}
        rows.append({**row, "exposed_ms": exposed_ms, "hidden": hidden})
    return rows


def tables(results: dict[str, Any]) -> str:
    """Formats a table for each device."""
    return "\n\n".join(_table(name, each) for name, each in results["devices"].items())


def _table(device: str, results: dict[str, Any]) -> str:
    """Formats the rate of the link, and a row for each variant."""
    attributes = results["calibration"]
    calibrated = (
        f"{DEVICES[device]}. Forward {attributes['forward_ms']:.0f} ms, "
        f"backward {attributes['backward_ms']:.0f} ms, "
        f"the ring alone {attributes['ring_ms']:.0f} ms "
        f"at {attributes['link_gbit_per_s']:.2f} Gbit/s."
    )
    header = ["", "step, ms", "communication alone, ms", "exposed, ms", "hidden"]
    cells = [["no communication", f"{results['alone_ms']:.1f}", "-", "-", "-"]]
    for row in results["rows"]:
        times = [f"{row[name]:.1f}" for name in ("step_ms", "communication_ms", "exposed_ms")]
        variant = VARIANTS[row["variant"]]
        # in shared memory there is too little to hide
        hidden = "-" if variant.communication == "shm" else f"{row['hidden']:.2f}"
        cells.append([variant.title, *times, hidden])
    return f"{calibrated}\n\n{common.table(header, cells)}"


def paint(results: dict[str, Any], axes: Any) -> None:
    names, exposed, hidden = [], [], []
    for device, each in results["devices"].items():
        for row in each["rows"]:
            names.append(f"{device}: {row['variant']}")
            exposed_ms = max(row["exposed_ms"], 0.0)
            exposed.append(exposed_ms / each["alone_ms"])
            hidden.append(max(row["communication_ms"] - exposed_ms, 0.0) / each["alone_ms"])
    axes.barh(names, [1.0] * len(names), label="step without communication")
    axes.barh(names, exposed, left=1.0, label="communication, exposed")
    starts = [1.0 - share for share in hidden]
    axes.barh(names, hidden, 0.3, left=starts, label="communication, hidden")
    axes.invert_yaxis()
    axes.set_xlabel("time of a step, relative to one without communication")
    axes.set_title("Link on which the ring takes as long as backward")
    axes.legend(fontsize=8)


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--layers", type=int, default=16, help="equal dense layers")
    parser.add_argument("--width", type=int, default=512, help="units of a layer")
    parser.add_argument("--batch", type=int, default=2048, help="examples of a worker")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument(
        "--layer-ms", type=float, default=10.0, help="backward of a layer on the accelerator"
    )
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    args = parser.parse_args()
    try:
        devices = {device: measure_device(device, args) for device in args.devices}
    except common.BenchmarkError as error:
        sys.exit(f"overlap: {error}")
    names = ("layers", "width", "batch", "layer_ms")
    model = {name: getattr(args, name) for name in names}
    results = {"machine": common.machine(), "model": model, "devices": devices}
    common.publish(results, args, tables, paint)


def measure_device(device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measures all variants.

    Args:
      device: one of DEVICES.
      args: arguments of the benchmark.

    Returns:
      Calibration, milliseconds of all rounds, and the rows of the table.
    """
    with network.joined() as link:
        bench = Bench(link, args, device)
        calibration = calibrate(link, bench, args.layers * bench.layer_bytes)
        actual = common.in_rounds(_measures(bench, args.variants), args.rounds, "overlap")
    if "none" not in actual:
        sys.exit("overlap: no step without communication to compare with")
    alone_ms = common.median([result["step"] for result in actual["none"]])
    expected_ms = calibration["forward_ms"] + calibration["backward_ms"]
    if abs(alone_ms / expected_ms - 1) > _DRIFT:
        common.log(
            f"a step without communication took {alone_ms:.0f} ms, but forward and backward took "
            f"{expected_ms:.0f} ms in the calibration: the machine is not quiet, run it again"
        )
    rows = evaluate(actual, alone_ms)
    return {"calibration": calibration, "rounds": actual, "alone_ms": alone_ms, "rows": rows}


def _measures(bench: Bench, names: list[str]) -> dict[str, Any]:
    def measure(variant: Variant) -> dict[str, float]:
        parts = ("step", "ring")
        return {part: bench.together(part, variant) for part in parts}

    alone = {"none": lambda: {"step": bench.alone("step")}}
    return {**alone, **{name: functools.partial(measure, VARIANTS[name]) for name in names}}


if __name__ == "__main__":
    main()
