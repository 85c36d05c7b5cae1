"""The `batten` command."""

from __future__ import annotations

import sys

from gateway.cli.edge import run


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
