"""Entry point of `python -m ringweave`: runs the command line."""

from ringweave.cli.main import main

if __name__ == "__main__":
    main()
