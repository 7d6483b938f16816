"""`hostopt doctor`: what is wrong with this machine or cluster, before a training finds it."""
