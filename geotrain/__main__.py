"""`python -m geotrain` is `geotrain`. I/O."""

from .cli import main

main()
