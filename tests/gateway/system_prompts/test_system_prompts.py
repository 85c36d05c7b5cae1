"""System prompts: what operators register, what of a prompt it covers, and what two tenants share
through a real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.kit.prompts import load_prompts
from gateway.kit.shared_prefixes import SharedPrefixTable, common
from gateway.models import Adapter, AdapterRevision
from gateway.system_prompts.service import conversation_start, publish, shared_prefixes
from tests.engine.harness import Harness
from worker.protocol.types import SharedPrefix

PATH = "/v1/admin/system_prompts"
SMOLLM2 = Path(__file__).parents[3] / ".cache" / "smollm2-135m-instruct"
SYSTEM = {"role": "system", "content": "You are terse."}
RENDERED = "system: You are terse.\nuser: "  # by the template of the tests: a token is a byte


async def register(admin: httpx.AsyncClient, **wanted: Any) -> dict[str, Any]:
    answer = await admin.post(PATH, json={"model": "tiny", **wanted})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def looked_up(deployment: Any) -> SharedPrefixTable:
    """As the process sees it once it looks again."""
    deployment.context.shared_prefixes.read_at = float("-inf")
    return await shared_prefixes(deployment.context)


async def chat(client: httpx.AsyncClient, question: str, system: str = SYSTEM["content"]) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 4}
    answer = await client.post("/v1/jobs", json={"endpoint": "/v1/chat/completions", "body": body})
    assert answer.status_code == 202, answer.text


async def add_adapter(deployment: Any, tenant: Any) -> None:
    """Named bot, of the content "a" * 64."""
    async with deployment.context.database.write() as session:
        session.add(
            Adapter(
                id="adapter_1",
                tenant_id=tenant.tenant_id,
                name="bot",
                base_model="tiny",
                promoted_revision_id="rev_1",
                created_at=1,
            )
        )
        await session.flush()
        session.add(
            AdapterRevision(
                id="rev_1",
                tenant_id=tenant.tenant_id,
                adapter_id="adapter_1",
                number=1,
                status="ready",
                digest="a" * 64,
                rank=2,
                bytes=1,
                upload_key="x",
                created_at=1,
                finished_at=1,
            )
        )


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 9, 3), 1), ((7,), (8,), 0)],
)
def test_where_two_prompts_part(
    one: tuple[int, ...], other: tuple[int, ...], expected: int
) -> None:
    assert common(one, other) == common(other, one) == expected


def test_the_longest_registered_prefix_counts_by_model_and_adapter() -> None:
    table = SharedPrefixTable()
    registered = [SharedPrefix((1, 2)), SharedPrefix((1, 2, 3, 4)), SharedPrefix((9,), "d")]
    table.replace({"m": registered})
    assert table.covered("m", "", (1, 2, 3, 9)) == 3
    assert table.covered("m", "", (9, 9)) == 0
    assert table.covered("m", "d", (9, 9)) == 1
    assert table.covered("other", "", (1, 2)) == 0


@pytest.mark.skipif(
    not (SMOLLM2 / "tokenizer.json").exists(), reason="SmolLM2 has not been made (make demo)"
)
@pytest.mark.parametrize("question", ["Hi!", "", "\n\n ", "Zebra", "a", "你好"])
def test_every_conversation_begins_with_what_is_registered(question: str) -> None:
    prompts = load_prompts(str(SMOLLM2))
    start = conversation_start(prompts, [SYSTEM])
    rendered = prompts.render_chat([SYSTEM, {"role": "user", "content": "…"}])
    assert len(start) >= len(prompts.encode(rendered.partition("…")[0])) - 1
    asked = prompts.encode_chat([SYSTEM, {"role": "user", "content": question}])
    assert common(start, asked) >= len(start) - 1  # a line break may join the question's
    told = [SYSTEM, {"role": "user", "content": question}]
    follows = prompts.encode_chat([*told, {"role": "assistant", "content": "Yes."}])
    whole = conversation_start(prompts, told)
    assert follows[: len(whole)] == whole


async def test_operators_register_and_delete(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    await add_adapter(deployment, tenant)
    chat = await register(admin, messages=[SYSTEM])
    assert (chat["tokens"], chat["messages"]) == (len(RENDERED), [SYSTEM])
    text = await register(admin, text="Once upon", adapter_digest="a" * 64)
    assert (text["tokens"], text["adapter_digest"]) == (9, "a" * 64)
    listed = (await admin.get(PATH)).json()["data"]
    assert [each["id"] for each in listed] == [text["id"], chat["id"]]
    assert (await admin.get(f"{PATH}/{chat['id']}")).json() == chat
    assert (await admin.delete(f"{PATH}/{chat['id']}")).json()["deleted"] is True
    assert (await admin.get(f"{PATH}/{chat['id']}")).status_code == 404
    assert (await admin.delete(f"{PATH}/{chat['id']}")).status_code == 404
    assert [each["id"] for each in (await admin.get(PATH)).json()["data"]] == [text["id"]]
    assert (await client.get(PATH)).status_code == 403


@pytest.mark.parametrize(
    ("wanted", "status"),
    [
        ({"model": "tiny"}, 400),
        ({"model": "tiny", "text": "a", "messages": [SYSTEM]}, 400),
        ({"model": "tiny", "text": ""}, 400),
        ({"model": "tiny", "text": "a\0"}, 400),
        ({"model": "tiny", "text": "x" * 2000}, 400),
        ({"model": "tiny", "messages": [{"role": "tool", "content": "x"}]}, 400),
        ({"model": "tiny", "text": "a", "adapter_digest": "short"}, 400),
        ({"model": "nothing", "text": "a"}, 404),
        ({"model": "tiny", "text": "a", "adapter_digest": "b" * 64}, 404),
    ],
)
async def test_what_cannot_be_registered(
    admin: httpx.AsyncClient, deployment: Any, wanted: dict[str, Any], status: int
) -> None:
    answer = await admin.post(PATH, json=wanted)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


async def test_a_request_says_how_much_of_its_prompt_is_shared(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, deployment: Any
) -> None:
    prompt = await register(admin, messages=[SYSTEM])
    await looked_up(deployment)
    await chat(client, "Hi")
    await chat(client, "Hi", system="You are t?")
    leases = await deployment.claim()
    shared = sorted(lease.request.shared_tokens for lease in leases)
    assert shared == [len("system: You are t"), len(RENDERED)]
    assert {lease.request.cache_scope for lease in leases} == {leases[0].request.tenant}
    await admin.delete(f"{PATH}/{prompt['id']}")
    await looked_up(deployment)
    await chat(client, "Ho")
    [lease] = await deployment.claim()
    assert lease.request.shared_tokens == 0


async def test_an_adapters_prompt_is_shared_with_that_adapter_alone(
    admin: httpx.AsyncClient, client: httpx.AsyncClient, tenant: Any, deployment: Any
) -> None:
    await add_adapter(deployment, tenant)
    await register(admin, text="Once upon", adapter_digest="a" * 64)
    await looked_up(deployment)
    for model in ("tiny", "bot"):
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 2}
        job = {"endpoint": "/v1/completions", "body": body}
        assert (await client.post("/v1/jobs", json=job)).status_code == 202
    by_model = {
        bool(lease.request.adapter): lease.request.shared_tokens
        for lease in await deployment.claim()
    }
    assert by_model == {False: 0, True: len("Once upon")}


async def test_workers_are_told_and_told_again_after_redis_lost_it(
    admin: httpx.AsyncClient, deployment: Any
) -> None:
    prefixes = deployment.context.queues.prefixes("tiny")
    await register(admin, text="Once upon")
    await looked_up(deployment)
    assert await publish(deployment.context, "tiny") is True
    assert await publish(deployment.context, "tiny") is False
    told = await prefixes.read("")
    assert told.prefixes == (SharedPrefix(deployment.prompts.encode("Once upon")),)
    await deployment.context.queues._client.flushall()
    assert await publish(deployment.context, "tiny") is True
    assert await prefixes.read(told.version) is None


async def test_two_tenants_share_the_registered_prefix_and_nothing_else(
    admin: httpx.AsyncClient,
    client: httpx.AsyncClient,
    other_client: httpx.AsyncClient,
    deployment: Any,
) -> None:
    """The messages of the gateway, run by an engine with pinned blocks."""
    await register(admin, messages=[SYSTEM])
    table = await looked_up(deployment)
    harness = Harness(num_blocks=100, pinned_share=0.2)  # blocks of four tokens
    assert harness.engine.share(table.of("tiny")) == len(RENDERED) // 4
    cached, answers = [], []
    for asking in (client, other_client, other_client, client):
        await chat(asking, "The same question?")
        [lease] = await deployment.claim()
        request = lease.request
        harness.add(
            request.request_id,
            request.prompt_ids,
            max_tokens=4,
            cache_scope=request.cache_scope,
            shared_tokens=request.shared_tokens,
        )
        while harness.engine.has_work():
            harness.step()
        cached.append(harness.finished()[request.request_id].usage.cached)
        answers.append(harness.answers(request.request_id))
    whole = (len(request.prompt_ids) - 1) // 4 * 4
    assert cached == [0, len(RENDERED) // 4 * 4, whole, whole]
    assert answers[0] == answers[1] == answers[2] == answers[3]
