"""Alembic's scripts, shipped with the distribution. Run them by `batten migrate`."""
