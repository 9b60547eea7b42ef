import sys

from maxrl_fast.__main__ import main

sys.exit(main(["report", *sys.argv[1:]]))
