"""Cameras that play against a server: what they see, how they ask, what came of it. Knows the server by HTTP alone."""
