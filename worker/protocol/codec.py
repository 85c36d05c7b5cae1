"""Bytes of the contract: msgpack, with a version in front of every message.

    b"\\x01" + msgpack(GenerateRequest | GenerationEvent)

A message of an unknown version is dead-lettered by whoever reads it, never retried.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from worker.protocol.messages import GenerateRequest, GenerationEvent

VERSION = 1

T = TypeVar("T")


class CodecError(ValueError):
    """Bytes that are not a message.

    CodecError
    ├── UnknownVersion    written by another release
    └── MalformedMessage  not msgpack, or fields missing or of the wrong type
    """


class UnknownVersion(CodecError):
    pass


class MalformedMessage(CodecError):
    pass


_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(GenerateRequest)
_event_decoder: msgspec.msgpack.Decoder[GenerationEvent] = msgspec.msgpack.Decoder(GenerationEvent)


def encode(message: GenerateRequest | GenerationEvent) -> bytes:
    return bytes((VERSION,)) + _encoder.encode(message)


def decode_request(data: bytes) -> GenerateRequest:
    """Raises UnknownVersion or MalformedMessage."""
    return _decode(_request_decoder, data)


def decode_event(data: bytes) -> GenerationEvent:
    """Raises UnknownVersion or MalformedMessage."""
    return _decode(_event_decoder, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if not data:
        raise MalformedMessage("empty message")
    if data[0] != VERSION:
        raise UnknownVersion(f"message version {data[0]}, this release reads {VERSION}")
    try:
        return decoder.decode(memoryview(data)[1:])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise MalformedMessage(str(error)) from error
