"""`python -m recgen` is the command `recgen`."""

from recgen.cli import main

main()
