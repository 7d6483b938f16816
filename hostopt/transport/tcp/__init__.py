"""Bulk data on TCP sockets, beside the gRPC connections of the same ranks."""
