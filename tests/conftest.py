"""Settings for tests that run side by side (pytest -n): they must be made before PyTorch is imported."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many busy threads as workers; subprocesses inherit it
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave their core to the other workers
