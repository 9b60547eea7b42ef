"""Score responses: by the task, or by a Python function in worker processes."""

# Every reward worker imports this package at its start, so nothing slow may be imported here.
