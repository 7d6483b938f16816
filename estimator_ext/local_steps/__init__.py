"""Local steps: replicas that train alone and synchronise every few steps."""
