"""`python -m memest`: the command line without an installed script."""

from __future__ import annotations

from memest.cli import main

if __name__ == "__main__":
    main()
