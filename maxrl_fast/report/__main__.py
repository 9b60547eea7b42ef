import sys

from maxrl_fast.report.command import main

sys.exit(main())
