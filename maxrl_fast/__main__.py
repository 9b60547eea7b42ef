"""The console script `maxrl-fast`, or `python -m maxrl_fast`: one entry for all commands."""

import sys

from maxrl_fast.runtime.output import main

if __name__ == "__main__":
    sys.exit(main())
