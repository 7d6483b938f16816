"""Share of payload in an all-reduce between two hosts connected by a link of known speed."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, network
from hostopt.measure import bench

HERE = Path(__file__).resolve().parent
SYSTEMS = {"tcp": "plain TCP, both ways", "none": "float32", "bf16": "bf16", "fp16": "fp16"}
_TIMEOUT_S = 300.0
_TCP_HEADER_BYTES, _ETHERNET_HEADER_BYTES = 52, 14  # IPv4 and TCP with timestamps


def measure(link: network.Link, system: str, size: int, repetitions: int) -> dict[str, float]:
    """Runs one rank on each side.

    Args:
      link: the link, with its rate set.
      system: one of SYSTEMS.
      size: number of reduced bytes.
      repetitions: repetitions of the all-reduce.

    Returns:
      Seconds of one all-reduce, the median of the slower rank, and bytes that the busier
      interface sent for it.

    Raises:
      BenchmarkError: a rank failed.
    """
    command = [sys.executable, HERE / "rank.py", "--size", size, "--repetitions", repetitions]
    environ = {**common.SAME_THREADS, "HOSTOPT_COMMUNICATION": "grpc+tcp"}
    if system == "tcp":
        command.append("--stream")
    else:
        environ["HOSTOPT_COMPRESSION"] = system
    ranks = common.results_in(link.run(command, _TIMEOUT_S, environ), 2)
    return {
        "seconds": max(common.median(rank["seconds"]) for rank in ranks),
        "sent_bytes": max(rank["sent_bytes"] for rank in ranks),
    }


def measure_all(mtu: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all systems over a new link.

    Args:
      mtu: size of the largest packet of the link, in bytes.
      args: arguments of the benchmark.

    Returns:
      One row for each system that did not fail.
    """
    ceiling = (mtu - _TCP_HEADER_BYTES) / (mtu + _ETHERNET_HEADER_BYTES)
    with network.joined(mtu) as link:
        link.set_rate(args.gbit * 1e9)
        measures = {
            system: functools.partial(measure, link, system, args.size, args.repetitions)
            for system in args.systems
        }
        name = f"{args.gbit:g} Gbit/s, MTU {mtu}"
        actual = common.in_rounds(measures, args.rounds, name)
    rows = []
    for system, rounds in actual.items():
        seconds = [result["seconds"] for result in rounds]
        sent_bytes = [result["sent_bytes"] for result in rounds]
        gbit_per_s = args.size * 8 / common.median(seconds) / 1e9
        rows.append(
            {
                "mtu": mtu,
                "tcp_payload_ceiling": ceiling,
                "system": system,
                "seconds_by_round": seconds,
                "sent_bytes_by_round": sent_bytes,
                "payload_gbit_per_s": gbit_per_s,
                "share_of_line": gbit_per_s / args.gbit,
                "sent_per_byte": common.median(sent_bytes) / args.size,
            }
        )
    return rows


def tables(results: dict[str, Any]) -> str:
    """Formats payload and sent bytes, by system and MTU."""
    rows = results["rows"]
    plain = {row["mtu"]: row["sent_per_byte"] for row in rows if row["system"] == "none"}
    header = ["", "MTU", "payload, Gbit/s", "share of the line", "TCP's ceiling"]
    header += ["bytes sent / size", "against float32"]
    return common.table(
        header,
        [
            [
                SYSTEMS[row["system"]],
                str(row["mtu"]),
                f"{row['payload_gbit_per_s']:.3f}",
                f"{row['share_of_line']:.3f}",
                f"{row['tcp_payload_ceiling']:.3f}",
                f"{row['sent_per_byte']:.4f}",
                common.ratio(row["sent_per_byte"], plain.get(row["mtu"])),
            ]
            for row in rows
        ],
    )


def paint(results: dict[str, Any], axes: Any) -> None:
    rows = results["rows"]
    names = [f"{SYSTEMS[row['system']]}\nMTU {row['mtu']}" for row in rows]
    shares = [row["share_of_line"] for row in rows]
    sent = [row["sent_per_byte"] for row in rows]
    common.bars(axes, names, {"payload / line rate": shares, "bytes sent / size": sent})
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.tick_params("x", labelsize=8)
    size = bench.format_size(results["size_bytes"])
    axes.set_title(f"All-reduce of {size}, 2 hosts, {results['line_gbit_per_s']:g} Gbit/s")


def main() -> None:
    parser = common.parser(__doc__, HERE)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--gbit", type=float, default=1.0, help="line rate, Gbit/s")
    parser.add_argument("--mtu", type=int, nargs="+", default=[1500, 9000], help="bytes")
    parser.add_argument("--size", type=bench.parse_size, default=bench.parse_size("64MiB"))
    parser.add_argument("--repetitions", type=int, default=5, help="in each round")
    args = parser.parse_args()
    try:
        rows = [row for mtu in args.mtu for row in measure_all(mtu, args)]
    except common.BenchmarkError as error:
        sys.exit(f"link: {error}")
    results = {
        "machine": common.machine(),
        "line_gbit_per_s": args.gbit,
        "size_bytes": args.size,
        "rows": rows,
    }
    common.publish(results, args, tables, paint)


if __name__ == "__main__":
    main()
