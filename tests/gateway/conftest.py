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

from gateway.app import create_app
from gateway.auth.scope import TenantScope
from gateway.kit.context import Context
from gateway.kit.database import Database
from gateway.kit.migrations import migrate
from gateway.kit.tasks import RecordedTasks
from gateway.settings import Settings
from gateway.tenants.service import create_key, create_tenant

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
    admin.execute(f"CREATE DATABASE {name} TEMPLATE batten_template STRATEGY file_copy")
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
