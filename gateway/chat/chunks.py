"""A streamed answer as OpenAI's chunks, from what workers say and, at the end, from the body.

Pure. Workers may say things twice (another attempt begins at index 0 again) or too late (the
token stream is capped and may be lost), so what was sent is remembered: repeated tokens are
compared and skipped, and the finished body supplies whatever has not been sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.jobs.generation import CHAT
from gateway.jobs.responses import (
    Answered,
    chat_logprobs,
    fingerprint,
    storable_text,
    text_logprobs,
)
from gateway.kit.prompts import Prompts
from worker.protocol.messages import Delta

JsonBody = dict[str, Any]


class StreamMismatch(Exception):
    """Another attempt says something else than what was already sent."""


@dataclass(slots=True)
class _Sent:
    """What the client has of one choice. `heard` is how much of the text the current attempt
    has said; `spelled` how long the tokens are, written out one by one."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    heard: int = 0
    spelled: int = 0


class Chunks:
    """Chunks of one request. `usage`: a last chunk with the usage was asked for."""

    def __init__(self, of: Answered, prompts: Prompts, *, usage: bool) -> None:
        self._of = of
        self._chat = of.endpoint == CHAT
        self._prompts = prompts
        self._usage = usage
        self._attempt = 0
        self._gap = False
        self._sent: dict[int, _Sent] = {}
        self._fingerprint = fingerprint(of.base_model, of.adapter_revision_id)

    def delta(self, event: Delta) -> list[JsonBody]:
        """Raises StreamMismatch."""
        if event.attempt < self._attempt:
            return []
        if event.attempt > self._attempt:
            self._begin(event.attempt)
        chunks, sent = self._open(event.choice)
        if self._gap or event.index > len(sent.tokens):
            self._gap = True  # entries were lost: the body has the rest
            return chunks
        known = len(sent.tokens) - event.index
        if list(event.token_ids[:known]) != sent.tokens[event.index :][: len(event.token_ids)]:
            raise StreamMismatch
        text = self._unsent(sent, storable_text(event.text))
        new = known < len(event.token_ids)
        logprobs = self._logprobs(sent, event, known) if new else None
        sent.tokens += event.token_ids[known:] if new else ()
        if text or logprobs is not None:
            chunks.append(self._piece(event.choice, text, logprobs))
        return chunks

    def finish(self, body: JsonBody) -> list[JsonBody]:
        """What is left of the answer's body. Raises StreamMismatch."""
        chunks: list[JsonBody] = []
        for choice in body["choices"]:
            chunks += self._finish_choice(choice)
        if self._usage:
            chunks.append({**self._chunk([]), "usage": body["usage"]})
        return chunks

    def _begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._gap = False
        for sent in self._sent.values():
            sent.heard = 0

    def _open(self, index: int) -> tuple[list[JsonBody], _Sent]:
        """The choice, and the chunk that introduces it the first time."""
        if index in self._sent:
            return [], self._sent[index]
        sent = self._sent[index] = _Sent()
        if not self._chat:
            return [], sent
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._chunk([self._choice(index, {"delta": delta})])], sent

    def _unsent(self, sent: _Sent, text: str) -> str:
        """The part of an attempt's next text that goes beyond what was sent."""
        known = sent.text[sent.heard : sent.heard + len(text)]
        if not text.startswith(known):
            raise StreamMismatch
        sent.heard += len(text)
        new = text[len(known) :]
        sent.text += new
        return new

    def _logprobs(self, sent: _Sent, event: Delta, known: int) -> JsonBody | None:
        if event.logprobs is None:
            return None
        new = event.logprobs[known:]
        if self._chat:
            return chat_logprobs(new, self._prompts)
        shown = text_logprobs(new, self._prompts, sent.spelled)
        sent.spelled += sum(map(len, shown["tokens"]))
        return shown

    def _finish_choice(self, choice: JsonBody) -> list[JsonBody]:
        index = choice["index"]
        chunks, sent = self._open(index)
        text = choice["message"]["content"] if self._chat else choice["text"]
        if not text.startswith(sent.text):
            raise StreamMismatch
        rest = text[len(sent.text) :]
        logprobs = self._rest_of_logprobs(choice["logprobs"], len(sent.tokens))
        if rest or logprobs is not None:
            chunks.append(self._piece(index, rest, logprobs))
        last: JsonBody = {"delta": {}} if self._chat else {"text": ""}
        chunks.append(
            self._chunk([self._choice(index, last, finish_reason=choice["finish_reason"])])
        )
        return chunks

    def _rest_of_logprobs(self, logprobs: JsonBody | None, sent: int) -> JsonBody | None:
        if logprobs is None:
            return None
        rest = {
            name: value[sent:] if isinstance(value, list) else value
            for name, value in logprobs.items()
        }
        return rest if rest["content" if self._chat else "tokens"] else None

    def _piece(self, index: int, text: str, logprobs: JsonBody | None) -> JsonBody:
        content = {"delta": {"content": text}} if self._chat else {"text": text}
        return self._chunk([self._choice(index, content, logprobs=logprobs)])

    def _choice(
        self,
        index: int,
        content: JsonBody,
        logprobs: JsonBody | None = None,
        finish_reason: str | None = None,
    ) -> JsonBody:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choices: list[JsonBody]) -> JsonBody:
        chunk = {
            "id": self._of.answer_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": self._of.created,
            "model": self._of.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
        return {**chunk, "usage": None} if self._usage else chunk
