"""Become a command that dies with the process that started it. Linux only in that last part.

Run as a script, by path: `python -I -S child.py PARENT_PID COMMAND ...`. The kernel sends the
command SIGKILL when the *thread* that started it ends, also by `kill -9`; asking for that from
here, between fork and exec, costs the supervisor no `preexec_fn`, which is unsafe in a process
with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != int(parent_pid):
            sys.exit("the supervisor died before this could start")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
