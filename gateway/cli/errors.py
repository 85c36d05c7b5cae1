"""What a command says when it cannot go on: one line, exit status 1 (2 for wrong usage).

CommandError
├── PortTaken        another process listens there
├── DataLocked       another supervisor runs on this data directory
├── StartFailed      a child process keeps ending before the system is ready
└── ServerRefused    the HTTP server answered with an error
"""

from __future__ import annotations

import click


class CommandError(click.ClickException):
    exit_code = 1


class PortTaken(CommandError):
    pass


class DataLocked(CommandError):
    pass


class StartFailed(CommandError):
    pass


class ServerRefused(CommandError):
    pass
