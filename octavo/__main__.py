"""`python -m octavo`: the same as the `octavo` command."""

from octavo.cli.app import main

main()
