"""The fixture of these tests."""

from tests.gpu_path.pretend import gpu

__all__ = ["gpu"]
