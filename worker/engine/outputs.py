"""What `Engine.step` says about requests. The last three end one; nothing follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from worker.protocol.types import Choice, ComputeTimes, RequestId, TokenLogprob, TokenUsage

StepFailureCode = Literal[
    "adapter_unavailable", "adapter_invalid", "store_unavailable", "numerical_error"
]


@dataclass(frozen=True, slots=True)
class StartedOutput:
    """Its first tokens were computed in this step."""

    request_id: RequestId


class DeltaOutput(msgspec.Struct, frozen=True, gc=False):
    """Choice `choice` grew by `token_ids`, from position `index` on, and by `text`.

    Text follows its tokens with delay where the next tokens may still change it (half a
    character, the beginning of a stop string). All texts of a choice, joined, are its text.
    """

    request_id: RequestId
    choice: int
    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    request_id: RequestId
    choices: tuple[Choice, ...]
    usage: TokenUsage
    times: ComputeTimes


@dataclass(frozen=True, slots=True)
class FailedOutput:
    request_id: RequestId
    code: StepFailureCode
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class CancelledOutput:
    request_id: RequestId


EngineOutput = StartedOutput | DeltaOutput | FinishedOutput | FailedOutput | CancelledOutput
