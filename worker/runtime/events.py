"""From what the engine says to what the contract says."""

from __future__ import annotations

from worker.engine.errors import RequestRefused
from worker.engine.outputs import (
    CancelledOutput,
    DeltaOutput,
    EngineOutput,
    FailedOutput,
    FinishedOutput,
    StartedOutput,
)
from worker.protocol.messages import (
    Cancelled,
    Delta,
    Failed,
    Finished,
    GenerateRequest,
    GenerationEvent,
    Started,
)


def to_event(output: EngineOutput, request: GenerateRequest, worker: str) -> GenerationEvent:
    match output:
        case StartedOutput():
            return Started(request.request_id, request.attempt, worker)
        case DeltaOutput():
            return Delta(
                request.request_id,
                request.attempt,
                output.choice,
                output.index,
                output.token_ids,
                output.text,
                output.logprobs,
            )
        case FinishedOutput():
            return Finished(
                request.request_id,
                request.attempt,
                output.choices,
                output.usage,
                worker,
                output.times,
            )
        case FailedOutput():
            return Failed(
                request.request_id, request.attempt, output.code, output.message, output.retryable
            )
        case CancelledOutput():
            return Cancelled(request.request_id, request.attempt)


def refusal(request: GenerateRequest, error: RequestRefused) -> Failed:
    """Final: what a worker announced was checked at submission, and a retry may come back here."""
    return Failed(request.request_id, request.attempt, error.code, str(error))
