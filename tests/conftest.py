"""Thread settings for tests that run in parallel (pytest -n). They must be set before PyTorch is imported."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one busy thread per worker; subprocesses inherit it
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave their core to the other workers
