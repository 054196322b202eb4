"""Coordinate a job: `python peers/coordinator.py JOB.toml` is `geotrain coordinator JOB.toml`. I/O."""

import sys

from geotrain.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "coordinator")
    main()
