"""Replace this process by a program that the kernel kills when its parent dies.

    python -I -S exec_bound.py PARENT_PID PROGRAM ARGUMENT…

Run by path with nothing but the standard library, so that it costs a few milliseconds. Linux only
has the signal (prctl(2), PR_SET_PDEATHSIG, kept across execve); elsewhere the guard does it alone.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the supervisor ended before this process began")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
