from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import ColumnElement, inspect, select, text

from gateway.cli.edge import describe
from gateway.kit.migrations import (
    ForeignSchema,
    config,
    migrate,
    migration_transaction,
    sync_url,
)
from gateway.models import Base, Request
from gateway.models.request import is_open, is_out, is_queued


def test_models_and_migrations_describe_the_same_schema(database_url: str) -> None:
    with migration_transaction(sync_url(database_url)) as connection:
        differences = compare_metadata(
            MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata
        )
    assert differences == []


def test_partial_indexes_are_partial(database_url: str) -> None:
    with migration_transaction(sync_url(database_url)) as connection:
        indexes = {index["name"]: index for index in inspect(connection).get_indexes("requests")}
    options = indexes["ix_requests_queued"]["dialect_options"]
    assert any("queued" in str(where) for where in options.values())


@pytest.mark.parametrize(
    ("condition", "index"),
    [
        (is_queued, "ix_requests_queued"),
        (is_out, "ix_requests_dispatched"),
        (is_open, "ix_requests_open_deadline"),
    ],
)
def test_conditions_are_those_of_partial_indexes(
    database_url: str, condition: Callable[[], ColumnElement[bool]], index: str
) -> None:
    one = Request.deadline_at < 1 if condition is is_open else Request.base_model == "tiny"
    with migration_transaction(sync_url(database_url)) as connection:
        query = select(Request.id).where(condition(), one)
        sql = query.compile(connection, compile_kwargs={"literal_binds": True})
        explain = "EXPLAIN QUERY PLAN"
        if connection.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL enable_seqscan = off"))
            explain = "EXPLAIN"
        plan = connection.execute(text(f"{explain} {sql}")).all()
    assert index in str(plan)


def test_a_default_price_exists(database_url: str) -> None:
    with migration_transaction(sync_url(database_url)) as connection:
        rows = connection.execute(text("SELECT model, batch_percent FROM prices")).all()
    assert [tuple(row) for row in rows] == [("*", 50)]


def test_migrating_again_changes_nothing(database_url: str) -> None:
    migrate(database_url)
    with migration_transaction(sync_url(database_url)) as connection:
        assert connection.execute(text("SELECT count(*) FROM prices")).scalar_one() == 1


def test_downgrade_leaves_nothing(database_url: str) -> None:
    with migration_transaction(sync_url(database_url)) as connection:
        command.downgrade(config(connection), "base")
    with migration_transaction(sync_url(database_url)) as connection:
        assert inspect(connection).get_table_names() == ["alembic_version"]


def test_processes_that_start_at_once_migrate_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'new' / 'batten.db'}"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(migrate, [url] * 4))
    with migration_transaction(sync_url(url)) as connection:
        assert connection.execute(text("SELECT count(*) FROM prices")).scalar_one() == 1


@pytest.mark.filterwarnings("ignore:Did not recognize type")
@pytest.mark.parametrize(
    "change",
    [
        "DROP TABLE usage_hours",
        "ALTER TABLE usage_hours RENAME COLUMN kind TO sort",
        "ALTER TABLE usage_hours ADD COLUMN other INTEGER",
        "ALTER TABLE usage_hours ADD COLUMN other BOX",
        "ALTER TABLE usage_hours DROP COLUMN requests;"
        "ALTER TABLE usage_hours ADD COLUMN requests VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE usage_hours DROP COLUMN requests;"
        "ALTER TABLE usage_hours ADD COLUMN requests BIGINT",
    ],
)
def test_another_schema_of_the_same_revision_is_refused(database_url: str, change: str) -> None:
    with migration_transaction(sync_url(database_url)) as connection:
        for statement in change.split(";"):
            connection.execute(text(statement))
    with pytest.raises(ForeignSchema, match=r"other tables \(usage_hours\)") as raised:
        migrate(database_url)
    assert describe(raised.value) == str(raised.value)


def test_tables_of_others_do_not_matter(database_url: str) -> None:
    with migration_transaction(sync_url(database_url)) as connection:
        connection.execute(text("CREATE TABLE not_ours (id INTEGER, at TIMESTAMP, place BOX)"))
    migrate(database_url)
