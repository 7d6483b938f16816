"""`hostopt doctor`: checks a machine and a cluster before a training runs there."""
