"""Joins the ring that the environment names, and prints what the ranks are."""

import json
import os
import sys

import hostopt

with hostopt.connect() as communicator:
    ranks = communicator.all_gather_bytes(str(communicator.rank).encode())
report = {
    "rank": communicator.rank,
    "ranks": [int(each) for each in ranks],
    "tf_config": json.loads(os.environ["TF_CONFIG"]),
    "threads": os.environ.get("TF_NUM_INTRAOP_THREADS"),
    "slot": os.environ.get("HOSTOPT_SLOT"),
}
sys.stdout.write(f"{json.dumps(report)}\n")  # at once, or mpirun may join it with other lines
sys.stdout.flush()
if communicator.rank == 1 and len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
