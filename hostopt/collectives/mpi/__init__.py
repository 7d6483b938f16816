"""Collectives whose data MPI carries. gRPC still connects the ranks and finds their faults."""
