"""`python -m ringweave`: the command line, for launchers that start Python modules."""

from ringweave.cli.main import main

if __name__ == "__main__":
    main()
