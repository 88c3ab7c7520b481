"""`python -m forerun`: the command line, where the script is not installed."""

from forerun.cli.main import main

if __name__ == "__main__":  # not in a spawned process, which imports this file again
    main()
