"""Give a machine to a run: `python peers/volunteer.py TICKET --duty 0.5` is `geotrain join TICKET --duty 0.5`. I/O."""

import sys

from geotrain.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "join")
    main()
