from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.models import SystemPrompt

Role = Literal["system", "developer", "user", "assistant"]


class PromptMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Role
    content: str = Field(max_length=1_000_000)

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class CreateSystemPrompt(BaseModel):
    """Either `text`, for completions, or the `messages` that conversations begin with. It is shared
    by requests to the base model, or by those with an adapter of the content `adapter_digest`,
    whose name and tenant do not matter; messages are then rendered by the newest one's template."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(description="A base model")
    text: str | None = Field(None, min_length=1, max_length=1_000_000)
    messages: list[PromptMessage] | None = Field(None, min_length=1, max_length=100)
    adapter_digest: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="A revision's `digest`"
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        if "\0" in f"{self.text}{self.messages}":
            raise ValueError("NUL characters cannot be stored")
        return self


class SystemPromptObject(BaseModel):
    """`tokens`: how many leading tokens of a prompt it covers."""

    id: str
    object: Literal["system_prompt"] = "system_prompt"
    model: str
    adapter_digest: str | None
    text: str | None
    messages: list[PromptMessage] | None
    tokens: int
    created_at: int


class SystemPromptDeleted(BaseModel):
    id: str
    object: Literal["system_prompt"] = "system_prompt"
    deleted: Literal[True] = True


def show_system_prompt(prompt: SystemPrompt) -> SystemPromptObject:
    return SystemPromptObject(
        id=prompt.id,
        model=prompt.base_model,
        adapter_digest=prompt.adapter_digest,
        text=prompt.text,
        messages=prompt.messages,
        tokens=len(prompt.token_ids),
        created_at=prompt.created_at // 1000,
    )
