"""Rewards that are computed outside the trainer."""

# Every reward worker imports this package when it starts: nothing heavy here.
