"""The benchmark: which images come in which order, what an adapter makes of them, and what is written down."""
