from __future__ import annotations

from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Ms


class Heartbeat(Base):
    """When a named activity last did its work (Celery's consumption, sweeps, collectors)."""

    __tablename__ = "heartbeats"

    name: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[Ms]
