"""Every way in which a line can be bad, and what must not bother anybody."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


def line(custom_id: Any = "a", drop: str = "", **changed: Any) -> bytes:
    value = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": BODY, **changed}
    value.pop(drop, None)
    return json.dumps(value, ensure_ascii=False).encode()


async def create(client: AsyncOpenAI, content: bytes, **options: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", **options
    )


BAD_LINES = [
    (b"{", "invalid_json_line", None),
    (b"[1]", "invalid_json_line", None),
    (b'"x"', "invalid_json_line", None),
    (b"null", "invalid_json_line", None),
    (line("id-1", body=BODY | {"temperature": 9}).replace(b"9", b"NaN"), "invalid_json_line", None),
    (line("id-2").replace(b"Hi", rb"\ud800"), "invalid_json_line", None),
    (line("id-3").replace(b"Hi", b"\xff"), "invalid_json_line", None),
    (line("id-4", drop="custom_id"), "missing_required_parameter", "custom_id"),
    (line(7), "invalid_type", "custom_id"),
    (line("x" * 513), "invalid_value", "custom_id"),
    (line("a\0b"), "invalid_value", "custom_id"),
    (line("id-5", drop="method"), "missing_required_parameter", "method"),
    (line("id-6", method="GET"), "invalid_value", "method"),
    (line("id-7", drop="url"), "missing_required_parameter", "url"),
    (line("id-8", url="/v1/completions"), "invalid_url", "url"),
    (line("id-9", drop="body"), "missing_required_parameter", "body"),
    (line("id-10", body=[1]), "invalid_type", "body"),
    (line("id-11", body=BODY | {"stream": True}), "streaming_unsupported", "body.stream"),
    (line("id-12", body={"messages": []}), "invalid_request", "body.model"),
    (line("id-13", body=BODY | {"model": "gpt-9"}), "model_not_found", "body.model"),
    (line("id-14", body=BODY | {"tools": [1]}), "unsupported_parameter", "body.tools"),
    (line("id-15", body=BODY | {"top_p": 0}), "invalid_value", "body.top_p"),
    (line("id-16", body=BODY | {"max_tokens": 2000}), "context_length_exceeded", "body.max_tokens"),
    (line("id-17", body=BODY | {"messages": "x"}), "invalid_type", "body.messages"),
]


async def test_all_bad_lines_are_reported_with_physical_numbers(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    content = b"\n" + line("good") + b"\n" + b"\n\n".join(bad for bad, _, _ in BAD_LINES)
    batch = await create(openai_client, content)
    await deployment.control()
    failed = await openai_client.batches.retrieve(batch.id)
    assert failed.status == "failed"
    assert failed.failed_at is not None
    assert failed.errors is not None
    found = [(error.code, error.param, error.line) for error in failed.errors.data or []]
    expected = [(code, param, 3 + 2 * n) for n, (_, code, param) in enumerate(BAD_LINES)]
    assert found == expected
    assert failed.request_counts.total == 0
    assert await deployment.work() == 0


async def test_a_repeated_custom_id_is_reported_at_its_second_line(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    batch = await create(openai_client, line("a") + b"\n" + line("b") + b"\n" + line("a"))
    await deployment.control()
    failed = await openai_client.batches.retrieve(batch.id)
    [error] = failed.errors.data
    assert (error.code, error.line) == ("duplicate_custom_id", 3)


@pytest.mark.parametrize("content", [b"\n", b"\n\n \r\n", b"\xef\xbb\xbf"])
async def test_a_file_without_requests_fails(
    openai_client: AsyncOpenAI, deployment: Any, content: bytes
) -> None:
    batch = await create(openai_client, content)
    await deployment.control()
    failed = await openai_client.batches.retrieve(batch.id)
    assert [error.code for error in failed.errors.data] == ["empty_file"]


async def test_byte_order_mark_crlf_blank_lines_and_unicode_separators_are_harmless(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    text = "one\u2028two\u2029three\x85four\x0b\x0cfive"
    tricky = line("tricky", body=BODY | {"messages": [{"role": "user", "content": text}]})
    content = b"\xef\xbb\xbf" + line("first") + b"\r\n\r\n" + tricky + b"\n\n" + line("last")
    batch = await create(openai_client, content)
    await deployment.control()
    await deployment.dispatch()
    leases = await deployment.claim()
    prompts = [lease.request.prompt_ids for lease in leases]
    assert deployment.prompts.encode(f"user: {text}\nassistant: ") in prompts
    for lease in leases:
        await deployment.answer(lease)
    await deployment.collect()
    await deployment.control()
    done = await openai_client.batches.retrieve(batch.id)
    assert (done.status, done.request_counts.completed) == ("completed", 3)


async def test_limits_of_a_file(
    openai_client: AsyncOpenAI, deployment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = deployment.context.settings.__dict__
    monkeypatch.setitem(settings, "batch_lines", 2)
    batch = await create(openai_client, b"\n".join(line(str(n)) for n in range(3)))
    await deployment.control()
    failed = await openai_client.batches.retrieve(batch.id)
    assert [error.code for error in failed.errors.data] == ["too_many_tasks"]

    monkeypatch.setitem(settings, "line_bytes", 400)
    long = line("long", body=BODY | {"user": "x" * 400_000})
    batch = await create(openai_client, long + b"\n" + line("short"))
    await deployment.control()
    failed = await openai_client.batches.retrieve(batch.id)
    assert [(error.code, error.line) for error in failed.errors.data] == [("line_too_long", 1)]

    monkeypatch.setitem(settings, "enqueued_tokens", 50)
    running = await create(openai_client, line("a") + b"\n" + line("b"))
    batch = await create(openai_client, line("a"))
    await deployment.control()
    assert (await openai_client.batches.retrieve(running.id)).status == "in_progress"
    failed = await openai_client.batches.retrieve(batch.id)
    assert [error.code for error in failed.errors.data] == ["token_limit_exceeded"]
    await deployment.finish_all()
    after = await create(openai_client, line("a"))
    await deployment.control()
    assert (await openai_client.batches.retrieve(after.id)).status == "in_progress"


async def test_bad_lines_can_be_skipped_into_the_error_file(
    openai_client: AsyncOpenAI, deployment: Any
) -> None:
    bad = [b"{", line("a"), line("b", body=BODY | {"model": "gpt-9"})]
    content = b"\n".join([line("a"), *bad, line("c")])
    batch = await create(openai_client, content, extra_body={"on_invalid": "skip"})
    await deployment.finish_all()
    done = await openai_client.batches.retrieve(batch.id)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 5, 2, 3)
    errors = (await openai_client.files.content(done.error_file_id)).text.splitlines()
    shown = [json.loads(each) for each in errors]
    assert [each["custom_id"] for each in shown] == [None, None, "b"]
    codes = [each["response"]["body"]["error"]["code"] for each in shown]
    assert codes == ["invalid_json_line", "duplicate_custom_id", "model_not_found"]

    nothing = await create(openai_client, b"{", extra_body={"on_invalid": "skip"})
    await deployment.finish_all()
    done = await openai_client.batches.retrieve(nothing.id)
    assert (done.status, done.request_counts.failed) == ("completed", 1)
