"""`python -m everstep.cli`, for where no entry point is installed."""

from everstep.cli import main

if __name__ == "__main__":
    main()
