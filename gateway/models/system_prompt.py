from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from gateway.models.base import Base, Id, Ms


class SystemPrompt(Base):
    """How prompts of many tenants begin, registered by the operator: its KV is shared.

    It is a text or chat messages, for a base model alone or with the adapter of one content
    (`adapter_digest`). `token_ids` are what every prompt that begins so begins with.
    """

    __tablename__ = "system_prompts"

    id: Mapped[Id]
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.name"))
    adapter_digest: Mapped[str | None]
    text: Mapped[str | None]
    messages: Mapped[list[Any] | None]
    token_ids: Mapped[list[Any]]
    created_at: Mapped[Ms]
    deleted_at: Mapped[Ms | None]
