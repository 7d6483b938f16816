"""The life of a session: signals, agreed stops, closing in time."""
