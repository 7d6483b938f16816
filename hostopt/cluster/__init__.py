"""The tasks of a cluster, from TF_CONFIG or a resolver."""
