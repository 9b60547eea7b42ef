"""Runs as one web page: `python -m maxrl_fast.report RUN... --out report.html`.

Files of the folders (`reading.py`) to data, data to a page that needs no network (`page.py`), and the command (`command.py`).
What the page does with the data is in `page/`: its style and scripts, which are put into every page.
"""

from maxrl_fast.report.command import main

__all__ = ["main"]
