"""The wire of version 1, field for field: what was written by one release is read by the next.

A file in `wire/v1/` never changes. A change of the contract that breaks one is a new version.
"""

import contextlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.protocol.codec import (
    VERSION,
    CodecError,
    MalformedMessage,
    UnknownVersion,
    decode_event,
    decode_request,
    encode,
)
from worker.protocol.messages import (
    Cancelled,
    Delta,
    Failed,
    Finished,
    GenerateRequest,
    LeaseLost,
    Started,
)
from worker.protocol.types import (
    AdapterRef,
    Choice,
    ComputeTimes,
    SamplingParams,
    TokenLogprob,
    TokenUsage,
)

WIRE = Path(__file__).parent / "wire" / "v1"

REQUESTS = {
    "request_full": GenerateRequest(
        request_id="req_1",
        attempt=2,
        epoch="e1",
        tenant="acme",
        model="org/base",
        prompt_ids=(1, 2, 151935),
        sampling=SamplingParams(
            max_tokens=16,
            seed=2**63 - 1,
            n=2,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            repetition_penalty=1.1,
            logit_bias=((5, -1.5),),
            logprobs=3,
            stop=("\n", "é"),
            ignore_eos=True,
        ),
        request_class="interactive",
        adapter=AdapterRef(digest="0123456789abcdef" * 4, rank=16),
        cache_scope="acme",
        deadline=1796000000.5,
        weight=3.0,
        order=7.25,
        suspects="suspects_1",
        stream=True,
    ),
    "request_shared": GenerateRequest(
        request_id="req_3",
        attempt=1,
        epoch="e1",
        tenant="acme",
        model="org/base",
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=1),
        cache_scope="acme",
        shared_tokens=2,
    ),
    "request_least": GenerateRequest(
        request_id="req_2",
        attempt=1,
        epoch="e1",
        tenant="acme",
        model="org/base",
        prompt_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
    ),
}

FIRST = Choice(
    index=0,
    text="hé",
    token_ids=(9, 10),
    finish_reason="stop",
    logprobs=(TokenLogprob(9, -0.5, ((9, -0.5), (8, -1.5))), TokenLogprob(10, -0.25)),
)
SECOND = Choice(index=1, text="", token_ids=(), finish_reason="length")
NAMED = {"request_id": "req_1", "attempt": 2}

EVENTS = {
    "started": Started(**NAMED, worker="w1"),
    "delta": Delta(**NAMED, choice=1, index=3, token_ids=(9, 10), text="hé"),
    "finished": Finished(
        **NAMED,
        choices=(FIRST, SECOND),
        usage=TokenUsage(prompt=3, cached=1, completion=2),
        worker="w1",
    ),
    "finished_timed": Finished(
        **NAMED,
        choices=(FIRST, SECOND),
        usage=TokenUsage(prompt=3, cached=1, completion=2),
        worker="w1",
        times=ComputeTimes(prefill=0.25, decode=1.5),
    ),
    "failed": Failed(**NAMED, code="engine_error", message="no", retryable=True),
    "lease_lost": LeaseLost(**NAMED, worker="w1", alone=True),
    "cancelled": Cancelled(**NAMED),
}


def golden(name: str) -> bytes:
    return bytes.fromhex((WIRE / f"{name}.hex").read_text())


def test_every_golden_message_is_checked():
    assert {path.stem for path in WIRE.glob("*.hex")} == REQUESTS.keys() | EVENTS.keys()


@pytest.mark.parametrize("name", REQUESTS)
def test_requests(name):
    """The same fields in the same order: only a map's header may be a wider one (msgspec writes
    it by the number of fields that there are, not of those that are sent)."""
    encoded = encode(REQUESTS[name])
    assert encoded[0] == golden(name)[0]
    fields = msgspec.msgpack.decode(encoded[1:])
    assert list(fields.items()) == list(msgspec.msgpack.decode(golden(name)[1:]).items())
    assert decode_request(encoded) == decode_request(golden(name)) == REQUESTS[name]


@pytest.mark.parametrize("name", EVENTS)
def test_events(name):
    assert encode(EVENTS[name]) == golden(name)
    assert decode_event(golden(name)) == EVENTS[name]


def test_the_first_byte_is_the_version():
    assert VERSION == 1
    assert all(golden(path.stem)[0] == 1 for path in WIRE.glob("*.hex"))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_refused_whatever_follows(version):
    for decode, name in ((decode_request, "request_full"), (decode_event, "started")):
        with pytest.raises(UnknownVersion, match=f"version {version}"):
            decode(bytes((version,)) + golden(name)[1:])
        with pytest.raises(UnknownVersion):
            decode(bytes((version,)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\x01\xc1",
        b"\x01\x80",
        b"\x01\x90",
        golden("request_full")[:-1],
        golden("request_full") + b"\x00",
        b"\x01" + msgspec.msgpack.encode({"request_id": "r", "attempt": "one"}),
        b"\x01\x81\xa5extra" + b"\x91" * 100_000,
        golden("cancelled").replace(b"req_1", b"req\xff1"),
    ],
)
def test_what_is_no_message_is_refused(data):
    for decode in (decode_request, decode_event):
        with pytest.raises(MalformedMessage):
            decode(data)


@given(st.sampled_from([*REQUESTS, *EVENTS]), st.data())
def test_damaged_bytes_are_a_message_or_refused(name, data):
    damaged = bytearray(golden(name))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    for decode in (decode_request, decode_event):
        with contextlib.suppress(CodecError):
            assert decode(bytes(damaged)).attempt is not None


def test_a_request_is_no_event_and_an_event_no_request():
    with pytest.raises(MalformedMessage):
        decode_event(golden("request_full"))
    with pytest.raises(MalformedMessage):
        decode_request(golden("finished"))


def test_an_unknown_event_is_refused():
    with pytest.raises(MalformedMessage):
        decode_event(b"\x01" + msgspec.msgpack.encode({"type": "exploded", **NAMED}))


def test_a_field_that_a_later_release_added_is_ignored():
    fields = msgspec.msgpack.decode(golden("cancelled")[1:]) | {"added_later": 1}
    assert decode_event(b"\x01" + msgspec.msgpack.encode(fields)) == EVENTS["cancelled"]
