"""Serves pipelines: a dispatcher and as many data workers as the argument says, until killed."""

from __future__ import annotations

import sys

import tensorflow as tf

service = tf.data.experimental.service

if __name__ == "__main__":
    dispatcher = service.DispatchServer()
    config = service.WorkerConfig(dispatcher.target.removeprefix("grpc://"))
    workers = [service.WorkerServer(config) for _ in range(int(sys.argv[1]))]
    print(f"serves at {dispatcher.target}", flush=True)
    dispatcher.join()
