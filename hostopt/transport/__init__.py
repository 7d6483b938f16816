"""How bytes get from one rank to another."""
