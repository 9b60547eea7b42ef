"""Show runs as one web page: `python -m maxrl_fast.report RUN... --out report.html`. `page/` holds
the style and the scripts, which are embedded in every page."""

from maxrl_fast.report.command import main

__all__ = ["main"]
