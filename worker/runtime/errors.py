"""Why a worker cannot start: one line that says what to do; exit status 1.

StartError
├── ModelUnusable       no such folder or hub id, or not a model that this release runs
├── AdapterUnusable     an adapter to verify that we refuse, or that cannot be read
├── QueueUnreachable    Redis does not answer at start (later it is retried for ever)
├── StoreUnusable       the object store's URL is wrong or its folder cannot be used
├── MetricsUnservable   the port for metrics is taken or not ours to use
└── WrongKernels        another package named `kernels` is imported instead of ours
"""

from __future__ import annotations


class StartError(Exception):
    pass


class ModelUnusable(StartError):
    pass


class AdapterUnusable(StartError):
    pass


class QueueUnreachable(StartError):
    pass


class StoreUnusable(StartError):
    pass


class MetricsUnservable(StartError):
    pass


class WrongKernels(StartError):
    pass
