"""`python -m forerun`: the command line, where the script is not installed."""

from forerun.cli.main import main

main()
