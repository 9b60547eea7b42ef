"""What `python -m maxrl_fast.evaluate` makes of a policy's samples: estimates, a table, a picture, files."""
