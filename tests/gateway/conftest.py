"""A gateway on a fresh database and an empty Redis, and clients of it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import httpx2
import psycopg
import pytest
import redis
from fastapi import FastAPI
from openai import AsyncOpenAI
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from gateway.adapters.base_models import register_base_model
from gateway.app import create_app
from gateway.auth.scope import TenantScope
from gateway.batches.finaliser import finalize_batch
from gateway.batches.validation import validate_batch
from gateway.collector.dispatcher import Dispatcher
from gateway.collector.fold import Fold
from gateway.collector.upkeep import Epochs
from gateway.jobs.withdrawal import withdraw
from gateway.kit.context import Context
from gateway.kit.database import Database
from gateway.kit.migrations import migrate
from gateway.kit.prompts import Prompts
from gateway.kit.tasks import RecordedTasks
from gateway.settings import Settings
from gateway.tenants.service import create_key, create_tenant
from worker.protocol.messages import Failed, FailureCode, Finished, Started
from worker.protocol.types import Capacity, Choice, TokenUsage
from worker.queue.base import Lease

ADMIN_KEY = "admin-key-of-the-tests"
BASE_URL = "http://gateway.test"

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Account:
    """A tenant with one key of all scopes."""

    tenant_id: str
    key_id: str
    secret: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    @property
    def scope(self) -> TenantScope:
        return TenantScope(self.tenant_id)


def write_tiny_model(folder: Path) -> Path:
    folder.mkdir()
    alphabet = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"max_position_embeddings": 1024}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    (folder / "chat_template.jinja").write_text(template)
    return folder


@dataclass
class Deployment:
    """One model, `tiny`: each process's work as a call, so that tests order them at will."""

    context: Context
    tasks: RecordedTasks
    prompts: Prompts
    model: str = "tiny"
    consumer: str = "test-collector"

    def __post_init__(self) -> None:
        self.queue = self.context.queues.queue(self.model)
        self.stream = self.context.queues.events(self.model)
        self.fold = Fold(self.context, self.model, self.prompts, self.tasks)
        self.epochs = Epochs(self.context, self.model, self.fold)

    async def dispatch(self) -> int:
        return await Dispatcher(self.context, self.model, self.prompts).fill()

    async def claim(self, requests: int = 1000, worker: str = "worker-1") -> list[Lease]:
        capacity = Capacity(kv_tokens=10_000_000, adapter_rank=1000, requests=requests)
        return await self.queue.claim(worker, capacity)

    async def started(self, lease: Lease) -> None:
        request = lease.request
        await self.queue.emit(lease, Started(request.request_id, request.attempt, lease.worker))
        await self.collect()

    async def answer(self, lease: Lease, text: str = "hello", cached: int = 0) -> bool:
        """Finish a lease; a completion token is a byte."""
        request = lease.request
        choices = tuple(
            Choice(index, text, tuple(self.prompts.encode(text)), "stop")
            for index in range(request.sampling.n)
        )
        completion = sum(len(choice.token_ids) for choice in choices)
        usage = TokenUsage(len(request.prompt_ids), cached, completion)
        event = Finished(request.request_id, request.attempt, choices, usage, lease.worker)
        return await self.queue.finish(lease, event)

    async def fail(self, lease: Lease, code: FailureCode, retryable: bool = False) -> bool:
        request = lease.request
        event = Failed(request.request_id, request.attempt, code, f"it was {code}", retryable)
        return await self.queue.finish(lease, event)

    async def collect(self) -> None:
        """Fold events until the stream is empty."""
        while await self.stream.pending():
            await self.fold.step(self.consumer, 0.01)

    async def work(self) -> int:
        """Dispatch, answer everything, collect, until nothing is left. Returns the answers."""
        answered = 0
        while await self.dispatch() or await self._has_ready():
            for lease in await self.claim():
                answered += await self.answer(lease)
            await self.collect()
        return answered

    async def control(self) -> None:
        """Do what the control processes were told to."""
        while self.tasks.sent:
            name, *args = self.tasks.sent.pop(0)
            match name:
                case "batches.validate":
                    await validate_batch(self.context, self.tasks, args[0])
                case "batches.finalize":
                    await finalize_batch(self.context, args[0])
                case "adapters.withdraw":
                    await withdraw(self.context, args[0])

    async def finish_all(self) -> None:
        """Everything that waits, to its end."""
        await self.control()
        while await self.work():
            await self.control()
        await self.control()

    async def _has_ready(self) -> bool:
        return any(depth.ready for depth in (await self.queue.depth()).values())


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def postgres_admin(postgres_directory: Path) -> Iterator[psycopg.Connection]:
    """A connection that makes databases; `batten_template` has the schema."""
    host = str(postgres_directory)
    with psycopg.connect(host=host, user="postgres", dbname="postgres", autocommit=True) as admin:
        admin.execute("CREATE DATABASE batten_template")
        migrate(f"postgresql://postgres@/batten_template?host={host}")
        yield admin


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database with the schema, of each kind in turn."""
    if request.param == "sqlite":
        path = tmp_path / "batten.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        yield f"sqlite:///{path}"
        return
    admin = request.getfixturevalue("postgres_admin")
    name = f"batten_{next(_numbers)}"
    admin.execute(f"CREATE DATABASE {name} TEMPLATE batten_template")
    yield f"postgresql://postgres@/{name}?host={admin.info.host}"
    admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def redis_url(redis_server_url: str) -> str:
    """An empty Redis."""
    with redis.Redis.from_url(redis_server_url) as client:
        client.flushall()
    return redis_server_url


@pytest.fixture
def settings(tmp_path: Path, database_url: str, redis_url: str) -> Settings:
    return Settings(
        data=tmp_path, database_url=database_url, redis_url=redis_url, admin_key=ADMIN_KEY
    )


@pytest.fixture
def tasks() -> RecordedTasks:
    """What the API told the control processes."""
    return RecordedTasks()


@pytest.fixture
async def app(settings: Settings, tasks: RecordedTasks) -> AsyncIterator[FastAPI]:
    app = create_app(settings, tasks)
    async with app.router.lifespan_context(app):
        yield app


@pytest.fixture
def context(app: FastAPI) -> Context:
    return app.state.context


@pytest.fixture
def database(context: Context) -> Database:
    return context.database


@pytest.fixture
def make_tenant(database: Database) -> Callable[..., Awaitable[Account]]:
    async def make(name: str | None = None, weight: float = 1.0, **key: object) -> Account:
        async with database.write() as session:
            tenant = await create_tenant(session, name or f"tenant-{next(_numbers)}", weight)
            created = await create_key(session, tenant.id, "test", **key)
            return Account(tenant.id, created.key.id, created.secret)

    return make


@pytest.fixture
async def tenant(make_tenant: Callable[..., Awaitable[Account]]) -> Account:
    return await make_tenant()


@pytest.fixture
async def other_tenant(make_tenant: Callable[..., Awaitable[Account]]) -> Account:
    return await make_tenant()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model's folder without weights: one token per byte, chats as `role: content`."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def deployment(context: Context, tiny_model: Path, tasks: RecordedTasks) -> Deployment:
    """A served model whose collector, workers and control tasks take one step when told."""
    async with context.database.write() as session:
        await register_base_model(session, "tiny", str(tiny_model))
    prompts = await context.prompts.of(str(tiny_model))
    return Deployment(context, tasks, prompts)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Without a key."""
    async with _client(app) as client:
        yield client


@pytest.fixture
async def client(app: FastAPI, tenant: Account) -> AsyncIterator[httpx.AsyncClient]:
    async with _client(app, tenant.headers) as client:
        yield client


@pytest.fixture
async def other_client(app: FastAPI, other_tenant: Account) -> AsyncIterator[httpx.AsyncClient]:
    async with _client(app, other_tenant.headers) as client:
        yield client


@pytest.fixture
async def admin(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with _client(app, {"Authorization": f"Bearer {ADMIN_KEY}"}) as client:
        yield client


@pytest.fixture
async def openai_client(app: FastAPI, tenant: Account) -> AsyncIterator[AsyncOpenAI]:
    """The official client, in this process."""
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield AsyncOpenAI(
            api_key=tenant.secret, base_url=f"{BASE_URL}/v1", http_client=http, max_retries=0
        )


def _client(app: FastAPI, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url=BASE_URL, headers=headers, timeout=30)
