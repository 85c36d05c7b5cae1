"""Kill process groups once whoever holds the other end of standard input is gone.

    +PGID    guard this group
    -PGID    it has ended
    EOF      kill every group that is left, and end

A pipe closes when its holder dies, even by SIGKILL, on every system. Run by path (`python -I -S`).
"""

import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
