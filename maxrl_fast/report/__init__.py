"""Show runs as one web page: `python -m maxrl_fast.report RUN... --out report.html`.

`reading.py` reads the files of the runs, `page.py` makes a page that needs no network, and
`command.py` is the command line. `page/` holds the style and the scripts, which are embedded in
every page.
"""

from maxrl_fast.report.command import main

__all__ = ["main"]
