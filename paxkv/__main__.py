"""`python -m paxkv` is the command `paxkv`."""

from paxkv.cli import main

if __name__ == "__main__":
    main()
