"""A model of the step time of 8 to 256 hosts, fitted to the other benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks import common
from hostopt.measure import bench

HERE = Path(__file__).resolve().parent
INPUTS = {name: HERE.parent / name / "results.json" for name in ("allreduce", "link", "overlap")}
MIB = 1 << 20
SYSTEMS = {"float32": "hostopt grpc+tcp", "bf16": "hostopt grpc+tcp bf16"}
HOSTS = (8, 16, 32, 64, 128, 256)
LINES_GBIT_PER_S = (10.0, 25.0, 100.0)
WIRE_BYTES = {"float32": 1.0, "bf16": 0.5}  # relative to float32
_TCP_SHARE = 0.956  # share of payload in a line, with packets of 1500 bytes
_FITTED_RANKS = 2


@dataclass(frozen=True)
class Costs:
    """Measured costs.

    Args:
      round_s: latency of one round of the ring, which is one message from rank to rank.
      byte_s: time of a rank for each byte of float32 that it sends and receives, without the time
        on the line, by wire format.
      line_share: share of payload in the rate of a line.
      update_s_per_byte: time of the optimizer for each byte of gradients.
    """

    round_s: float
    byte_s: dict[str, float]
    line_share: float
    update_s_per_byte: float


@dataclass(frozen=True)
class Workload:
    """One training step on each host.

    Args:
      gradient_bytes: bytes of float32 gradients.
      bucket_bytes: bytes of a bucket.
      forward_s: time of forward of the local batch.
      backward_s: time of backward of the local batch.
    """

    gradient_bytes: float
    bucket_bytes: float
    forward_s: float
    backward_s: float


def read_inputs(allreduce: Path, link: Path, overlap: Path) -> tuple[dict[str, Any], Any, Any]:
    """Reads the results of the other benchmarks.

    Args:
      allreduce: file of the results of that benchmark.
      link: file of the results of that benchmark, which may be missing.
      overlap: file of the results of that benchmark, which may be missing.

    Returns:
      The results of each, for `read_costs`.

    Raises:
      BenchmarkError: there are no times to fit the model to.
    """
    results = _read(allreduce)
    if results is None or SYSTEMS["float32"] not in results["gb_per_s"]:
        raise common.BenchmarkError(
            f"no times of {SYSTEMS['float32']!r} in {allreduce}: measure them"
        )
    return results, _read(link), _read(overlap)


def _read(path: Path) -> Any:
    if not path.exists():
        common.log(f"{path} does not exist")
        return None
    return json.loads(path.read_text())


def fit(seconds: dict[int, float]) -> tuple[float, float]:
    """Fits ``alpha + beta * bytes`` by least squares of relative errors.

    Args:
      seconds: time of an all-reduce by size in bytes.

    Returns:
      alpha in seconds and beta in seconds per byte, both at least 0.
    """
    sizes = np.array(list(seconds), np.float64)
    times = np.array(list(seconds.values()), np.float64)
    rows = np.stack([1 / times, sizes / times], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)
    return max(float(alpha), 0.0), max(float(beta), 0.0)


def read_costs(allreduce: dict[str, Any], link: Any, overlap: Any) -> Costs:
    """Derives the costs from the results of the other benchmarks.

    Args:
      allreduce: results of that benchmark.
      link: results of that benchmark; None uses the share of TCP.
      overlap: results of that benchmark; None, or one without a processor, assumes that the update
        takes no time.

    Returns:
      The costs.
    """
    fits = {
        wire: fit(_seconds(allreduce["gb_per_s"][system]))
        for wire, system in SYSTEMS.items()
        if system in allreduce["gb_per_s"]
    }
    alpha, plain = fits["float32"]
    sent_per_byte = 2 * (_FITTED_RANKS - 1) / _FITTED_RANKS
    byte_s = {wire: fits.get(wire, (alpha, plain))[1] / sent_per_byte for wire in SYSTEMS}
    line_share = _TCP_SHARE
    if link is not None:
        shares = [row["share_of_line"] for row in link["rows"] if row["system"] == "none"]
        line_share = min(shares, default=_TCP_SHARE)
    update = 0.0
    if overlap is not None and "processor" in overlap["devices"]:
        model, computed = overlap["model"], overlap["devices"]["processor"]
        attributes = computed["calibration"]
        update_ms = computed["alone_ms"] - attributes["forward_ms"] - attributes["backward_ms"]
        update = max(update_ms, 0.0) / 1e3 / (4 * model["layers"] * model["width"] ** 2)
    return Costs(alpha / (2 * (_FITTED_RANKS - 1)), byte_s, line_share, update)


def _seconds(rates: dict[str, float]) -> dict[int, float]:
    return {int(size): int(size) / rate / 1e9 for size, rate in rates.items()}


def ring_s(costs: Costs, size: int, nbytes: float, line_gbit_per_s: float, wire: str) -> float:
    """Returns the seconds of an all-reduce in a flat ring.

    Args:
      costs: measured costs.
      size: number of hosts.
      nbytes: number of reduced bytes of float32.
      line_gbit_per_s: rate of each host's line.
      wire: wire format, one of WIRE_BYTES.

    Returns:
      Time of 2 (size - 1) rounds, each with its latency and 1 / size of the bytes, at the speed of
      the processor or the line, whichever is slower.
    """
    line_byte_s = WIRE_BYTES[wire] * 8 / (line_gbit_per_s * 1e9 * costs.line_share)
    round_s = costs.round_s + nbytes / size * max(costs.byte_s[wire], line_byte_s)
    return 2 * (size - 1) * round_s


def step_s(costs: Costs, work: Workload, bucket_ring_s: float) -> float:
    """Returns the seconds of a step whose buckets are reduced during backward.

    Backward fills one of k buckets in each 1/k of its time. The ring reduces them one after the
    other, and the last one is full when backward ends. So the ring ends after "backward, then one
    bucket" or "one k-th of backward, then all buckets", whichever takes longer. The update of all
    buckets but the last is hidden as well.

    Args:
      costs: measured costs.
      work: workload of the step.
      bucket_ring_s: time of the ring for one bucket.

    Returns:
      forward + max(backward + r, backward / k + k r) + update / k.
    """
    buckets = max(round(work.gradient_bytes / work.bucket_bytes), 1)
    reduced_s = max(
        work.backward_s + bucket_ring_s, work.backward_s / buckets + buckets * bucket_ring_s
    )
    update_s = costs.update_s_per_byte * work.gradient_bytes / buckets
    return work.forward_s + reduced_s + update_s


def forecast(costs: Costs, work: Workload) -> list[dict[str, Any]]:
    """Predicts the step time for every number of hosts, line and wire format."""
    rows = []
    buckets = max(round(work.gradient_bytes / work.bucket_bytes), 1)
    update_s = costs.update_s_per_byte * work.gradient_bytes
    alone_s = work.forward_s + work.backward_s + update_s
    for line in LINES_GBIT_PER_S:
        for wire in WIRE_BYTES:
            for size in HOSTS:
                bucket_s = ring_s(costs, size, work.gradient_bytes / buckets, line, wire)
                total_s = step_s(costs, work, bucket_s)
                row = {"line_gbit_per_s": line, "wire": wire, "hosts": size}
                row.update(ring_ms=buckets * bucket_s * 1e3, step_ms=total_s * 1e3)
                rows.append({**row, "efficiency": min(alone_s / total_s, 1.0)})
    return rows


def tables(results: dict[str, Any]) -> str:
    """Formats the quality of the fit, and the predictions."""
    costs, work = Costs(**results["costs"]), Workload(**results["workload"])
    float32_s, bf16_s = costs.byte_s["float32"] * 1e9, costs.byte_s["bf16"] * 1e9
    message = (
        f"Fitted: {costs.round_s * 1e6:.0f} us a round, {float32_s:.2f} s/GB in a rank "
        f"({bf16_s:.2f} with bf16), {costs.line_share:.3f} of a line is payload, update "
        f"{costs.update_s_per_byte * 1e9:.2f} s/GB. Step: {work.gradient_bytes / MIB:g} MiB of "
        f"gradients in buckets of {work.bucket_bytes / MIB:g} MiB, forward "
        f"{work.forward_s * 1e3:.0f} ms, backward {work.backward_s * 1e3:.0f} ms."
    )
    fitted = [
        [
            bench.format_size(row["size_bytes"]),
            f"{row['measured_ms']:.2f}",
            f"{row['modelled_ms']:.2f}",
        ]
        for row in results["fit"]
    ]
    header = ["line", "on the wire", *(f"{size} hosts" for size in HOSTS)]
    lines: dict[tuple[float, str], list[str]] = {}
    for row in results["forecast"]:
        cell = f"{row['step_ms']:.0f} ms ({row['efficiency']:.2f})"
        lines.setdefault((row["line_gbit_per_s"], row["wire"]), []).append(cell)
    rows = [[f"{line:g} Gbit/s", wire, *cells] for (line, wire), cells in lines.items()]
    return "\n\n".join(
        [
            message,
            common.table(["2 ranks", "measured, ms", "modelled, ms"], fitted),
            common.table(header, rows),
        ]
    )


def paint(results: dict[str, Any], axes: Any) -> None:
    for line in LINES_GBIT_PER_S:
        for wire in WIRE_BYTES:
            rows = [
                row
                for row in results["forecast"]
                if (row["line_gbit_per_s"], row["wire"]) == (line, wire)
            ]
            hosts = [row["hosts"] for row in rows]
            shares = [row["efficiency"] for row in rows]
            axes.plot(hosts, shares, "o-", label=f"{line:g} Gbit/s, {wire}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(HOSTS, [str(size) for size in HOSTS])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("hosts")
    axes.set_ylabel("step without communication / step")
    axes.set_title("A model, not a measurement")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, path in INPUTS.items():
        parser.add_argument(f"--{name}", type=Path, default=path, help="its results")
    parser.add_argument("--gradient-mb", type=float, default=100.0, help="MiB of gradients")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="MiB of a bucket")
    parser.add_argument("--forward-ms", type=float, default=50.0)
    parser.add_argument("--backward-ms", type=float, default=100.0)
    parser.add_argument("--json", type=Path, default=HERE / "results.json")
    parser.add_argument("--png", type=Path, default=HERE / "results.png")
    args = parser.parse_args()
    try:
        allreduce, link, overlap = read_inputs(args.allreduce, args.link, args.overlap)
    except common.BenchmarkError as error:
        sys.exit(f"model: {error}")
    costs = read_costs(allreduce, link, overlap)
    work = Workload(
        args.gradient_mb * MIB, args.bucket_mb * MIB, args.forward_ms / 1e3, args.backward_ms / 1e3
    )
    fitted = [
        {
            "size_bytes": size,
            "measured_ms": seconds * 1e3,
            "modelled_ms": ring_s(costs, _FITTED_RANKS, size, float("inf"), "float32") * 1e3,
        }
        for size, seconds in _seconds(allreduce["gb_per_s"][SYSTEMS["float32"]]).items()
    ]
    results = {
        "machine": allreduce["machine"],
        "costs": asdict(costs),
        "workload": asdict(work),
        "fit": fitted,
        "forecast": forecast(costs, work),
    }
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
