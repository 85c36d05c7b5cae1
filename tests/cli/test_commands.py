from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway.cli.edge import describe
from gateway.cli.root import COMMANDS, root
from worker.__main__ import main as worker
from worker.queue.base import QueueUnavailable


@pytest.fixture(scope="module")
def one_tenant(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a database that knows the tenant acme."""
    url = f"sqlite:///{tmp_path_factory.mktemp('one') / 'batten.db'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATABASE_URL", url)
        for args in (["migrate"], ["tenant", "create", "acme"]):
            result = CliRunner().invoke(root, args)
            assert result.exit_code == 0, result.output
    return url


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def test_help_names_every_command(batten) -> None:
    done = batten("--help")
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"worker", "plan"}))
def test_each_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(root, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Usage: root " + name)


def test_help_imports_nothing_heavy() -> None:
    """So it is instant: what takes time is imported by the command that needs it."""
    script = (
        "import sys; from gateway.cli.edge import run; run(['--help']);"
        "heavy = {'pydantic', 'sqlalchemy', 'fastapi', 'celery', 'redis', 'httpx', 'torch'};"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_worker_passes_everything_on(batten) -> None:
    done = batten("worker", "--help")
    assert done.returncode == 0
    assert "python -m worker" in done.stdout


def test_plan_passes_everything_on(batten) -> None:
    done = batten("plan", "--help")
    assert done.returncode == 0
    assert "bytes per token" in done.stdout


def test_tenants_and_keys_are_made_on_the_servers_host(batten) -> None:
    assert batten("migrate").returncode == 0
    tenant_id = batten("tenant", "create", "acme", "--weight", "2").stdout.strip()
    assert tenant_id.startswith("tenant_")
    listed = batten("tenant", "list").stdout
    assert tenant_id in listed
    assert "acme" in listed
    secret = batten("key", "create", "acme").stdout.strip()
    assert secret.startswith("bt_")
    assert batten("key", "create", "--admin").stdout.strip() != secret


def test_a_key_is_found_by_its_list_and_revoked(batten) -> None:
    assert batten("migrate").returncode == 0
    batten("tenant", "create", "acme")
    secrets = [batten("key", "create", "acme", "--name", name).stdout for name in ("ci", "old")]
    batten("key", "create", "--admin", "--name", "operator")

    newest = listed_keys(batten, "acme")[0]
    assert (newest["name"], newest["scopes"], newest["state"]) == ("old", "all", "active")
    assert secrets[1].startswith(newest["secret"].partition("…")[0])
    assert batten("key", "revoke", newest["id"]).returncode == 0

    states = [(key["name"], key["state"]) for key in listed_keys(batten, "acme")]
    assert states == [("old", "revoked"), ("ci", "active")]
    assert [key["name"] for key in listed_keys(batten, "--admin")] == ["operator"]


def test_names_are_listed_as_they_are(batten) -> None:
    name, wide = "[/x] [red] :key:", {"COLUMNS": "200"}
    batten("migrate")
    assert batten("tenant", "create", name).returncode == 0
    assert batten("key", "create", "--name", name, name).returncode == 0
    assert f" {name} " in batten("tenant", "list", **wide).stdout
    assert f" {name} " in batten("key", "list", name, **wide).stdout
    assert f" {name} " in batten("config", BATTEN_MODEL=name, **wide).stdout


def listed_keys(batten, whose: str) -> list[dict[str, str]]:
    done = batten("key", "list", whose)
    assert done.returncode == 0, done.stderr
    names = ("id", "name", "secret", "scopes", "state")
    rows = [line for line in lines(done.stdout) if line.startswith("│")]
    return [
        dict(zip(names, (cell.strip() for cell in row.strip("│").split("│")), strict=True))
        for row in rows
    ]


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        (["tenant", "create", "acme"], 1, "a tenant named 'acme' exists"),
        (["key", "create", "nobody"], 1, "no such tenant: 'nobody'"),
        (["key", "revoke", "key_0"], 1, "no such key: 'key_0'"),
        (["key", "create"], 2, "either tenant or --admin"),
        (["key", "list"], 2, "either tenant or --admin"),
        (["key", "list", "nobody"], 1, "no such tenant: 'nobody'"),
        (["key", "create", "--admin", "--scope", "read"], 2, "--scope is for a tenant's key"),
        (["key", "create", "acme", "--name", ""], 2, "name: string should have at least 1"),
        (["key", "create", "acme", "--scope", "job:read"], 1, "inference, invoices, jobs, models"),
        (["tenant", "create", ""], 2, "name: string should have at least 1 character"),
        (["tenant", "create", "acme\n"], 2, "name: string should match pattern"),
        (["tenant", "create", "other", "--weight", "0"], 2, "weight: input should be greater"),
        (["tenant", "create", "other", "--weight", "inf"], 2, "weight: input should be less"),
        (["tenant", "create", "other", "--weight", "nan"], 2, "weight: input should be less"),
        (["nonsense"], 2, "no such command 'nonsense'"),
    ],
)
def test_errors_are_one_line(
    batten, one_tenant: str, args: list[str], status: int, says: str
) -> None:
    done = batten(*args, DATABASE_URL=one_tenant)
    assert done.returncode == status
    assert says in lines(done.stderr)[-1].lower()
    assert "Traceback" not in done.stderr


def test_of_errors_in_a_group_the_first_is_said() -> None:
    group = ExceptionGroup(
        "tasks", [ExceptionGroup("inner", [QueueUnavailable("away"), OSError()])]
    )
    assert describe(group) == describe(QueueUnavailable("away"))


def test_a_database_without_tables_says_what_to_do(batten, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "batten.db").touch()
    done = batten("tenant", "list")
    assert done.returncode == 1
    assert "run `batten migrate`" in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        ["tenant", "list"],
        ["tenant", "create", "acme"],
        ["key", "create", "acme"],
        ["key", "list", "acme"],
        ["key", "revoke", "key_0"],
        ["adapter", "list", "acme"],
        ["audit"],
        ["control", "--check"],
        ["api"],
    ],
)
def test_where_there_is_no_deployment_none_is_made(batten, tmp_path: Path, args: list[str]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    done = batten(*args, REDIS_URL="redis://127.0.0.1:1/0")
    assert done.returncode == 1
    (line,) = lines(done.stderr)
    assert line.startswith(f"Error: there is no deployment here: {data / 'batten.db'} does not")
    assert "`batten up` starts one" in line
    assert not list(data.iterdir())


def test_sqlite_may_be_named_by_a_uri(batten, tmp_path: Path) -> None:
    file = tmp_path / "a b" / "c.db"
    url = f"sqlite:///file:{tmp_path}/a%2520b/c.db?uri=true"  # SQLAlchemy unquotes it once
    said = batten("tenant", "list", DATABASE_URL=url).stderr
    assert f"there is no deployment here: {file} does not exist" in said
    assert batten("migrate", DATABASE_URL=url).returncode == 0
    assert [each.name for each in tmp_path.iterdir()] == ["a b"]
    assert file.is_file()
    assert batten("tenant", "create", "acme", DATABASE_URL=url).returncode == 0
    assert "acme" in batten("tenant", "list", DATABASE_URL=url).stdout


def test_a_database_that_cannot_be_reached(batten) -> None:
    done = batten("tenant", "list", DATABASE_URL="postgresql://postgres@127.0.0.1:1/none")
    assert done.returncode == 1
    assert lines(done.stderr)[-1].startswith("Error: the database cannot be used: ")


def test_a_server_that_cannot_be_reached_is_named(batten, tmp_path: Path) -> None:
    batch = tmp_path / "lines.jsonl"
    batch.write_text('{"url": "/v1/completions"}\n')
    done = batten("batch", "run", str(batch), "--key", "x", "--url", "http://u:secret@127.0.0.1:1")
    assert done.returncode == 1
    last = lines(done.stderr)[-1]
    assert last.startswith("Error: the server at http://127.0.0.1:1 cannot be reached: ")
    assert "BATTEN_URL" in last
    assert "secret" not in done.stderr
    assert "BATTEN_API_KEY" in batten("batch", "run", str(batch)).stderr


def test_an_output_without_a_folder_is_refused_before_anything_is_sent(
    batten, tmp_path: Path
) -> None:
    batch = tmp_path / "lines.jsonl"
    batch.write_text('{"url": "/v1/completions"}\n')
    output = tmp_path / "nowhere" / "answers.jsonl"
    nobody = ("--key", "x", "--url", "http://127.0.0.1:1")
    done = batten("batch", "run", str(batch), "-o", str(output), *nobody)
    assert done.returncode == 2
    assert f"there is no folder {output.parent}" in done.stderr


@pytest.mark.parametrize("name", ["api", "collector", "control"])
def test_a_process_on_its_own_needs_redis(batten, name: str) -> None:
    done = batten(name)
    assert done.returncode == 1
    assert lines(done.stderr)[-1].startswith("Error: REDIS_URL is not set")


def test_config_shows_settings_and_no_secret(batten) -> None:
    done = batten(
        "config",
        "--env",
        BATTEN_ADMIN_KEY="secret-one",
        REDIS_URL="redis://user:secret-two@cache:6379/0",
        DATABASE_URL="postgresql://batten:secret-three@db/batten",
        BATTEN_PORT="9000",
    )
    assert done.returncode == 0
    shown = dict(line.split("=", 1) for line in lines(done.stdout))
    assert "secret-" not in done.stdout
    assert shown["REDIS_URL"] == "redis://user:********@cache:6379/0"
    assert shown["BATTEN_PORT"] == "9000"
    assert shown["BATTEN_BATCH_LINES"] == "50000"


def test_config_shows_what_workers_alone_have(batten) -> None:
    done = batten("config", "--env", BATTEN_KV_MEMORY="2GiB", BATTEN_DETERMINISTIC="1")
    assert done.returncode == 0, done.stderr
    rows = [line.split("=", 1) for line in lines(done.stdout)]
    shown = dict(rows)
    assert len(shown) == len(rows)  # what both have is there once
    assert (shown["BATTEN_KV_MEMORY"], shown["BATTEN_DETERMINISTIC"]) == (str(2 << 30), "True")
    assert (shown["BATTEN_MAX_SEQUENCES"], shown["BATTEN_THREADS"]) == ("256", "")
    known = {option.envvar for option in worker.params if option.envvar}
    assert known <= shown.keys()
    wrong = batten("config", BATTEN_KV_MEMORY="much")
    assert wrong.returncode == 1
    assert "'much' is not a size" in lines(wrong.stderr)[-1]
    assert "Traceback" not in wrong.stderr


def test_every_worker_setting_has_a_meaning(batten) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "worker", "config", "--json"],
        env={**os.environ, "REDIS_URL": "redis://user:secret-one@cache:6379/0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "secret-one" not in shown
    assert all(meaning for _, _, meaning in json.loads(shown))


def test_config_names_settings_whole_in_a_narrow_terminal(batten) -> None:
    shown = batten("config", COLUMNS="80").stdout
    assert "BATTEN_LONG_POLL_SECONDS" in shown
    assert max(map(len, lines(shown))) <= 80


def test_a_wrong_setting_is_named(batten) -> None:
    done = batten("config", BATTEN_PORT="many", BATTEN_QUEUE_WINDOW="0")
    assert done.returncode == 1
    (line,) = lines(done.stderr)
    assert "BATTEN_PORT: " in line
    assert "BATTEN_QUEUE_WINDOW: " in line


@pytest.mark.parametrize("name", ["LOG_LEVEL", "BATTEN_LOG_LEVEL"])
def test_of_two_names_of_a_setting_the_one_that_is_set_is_named(batten, name: str) -> None:
    done = batten("config", **{"BATTEN_LOG_LEVEL": "", "LOG_LEVEL": "INFO", name: "LOUD"})
    (line,) = lines(done.stderr)
    assert line.startswith(f"Error: {name}: ")


def test_a_log_level_may_be_written_as_other_programs_have_it(batten) -> None:
    assert batten("config", LOG_LEVEL="warn").returncode == 0


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("BATTEN_LOG_LEVEL", ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL")),
        ("BATTEN_GENERATION_CONFIG", ("auto", "neutral")),
        ("BATTEN_DTYPE", ("auto", "float32", "bfloat16")),
        ("BATTEN_ENGINE", ("hf", "null")),
        ("BATTEN_LOG_FORMAT", ("auto", "json", "console")),
    ],
)
def test_a_wrong_choice_is_refused_with_those_there_are(
    batten, name: str, values: tuple[str, ...]
) -> None:
    done = batten("config", **{name: "loud"})
    assert done.returncode == 1
    (line,) = lines(done.stderr)
    assert name in line
    assert all(f"'{value}'" in line for value in values)


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        ((), "BATTEN_LOG_LEVEL", "critical"),
        (("generate", __file__), "BATTEN_DTYPE", "float32"),
    ],
)
def test_a_worker_refuses_it_too(batten, args: tuple[str, ...], name: str, value: str) -> None:
    wrong = batten("worker", *args, **{name: "loud"})
    assert wrong.returncode == 2
    last = lines(wrong.stderr)[-1]
    assert name in last
    assert f"'{value}'" in last


def test_log_levels_are_taken_in_small_letters(batten) -> None:
    for variable in ("BATTEN_LOG_LEVEL", "LOG_LEVEL"):
        assert "BATTEN_LOG_LEVEL=ERROR\n" in batten("config", "--env", **{variable: "error"}).stdout
    shown = batten("worker", "config", BATTEN_LOG_LEVEL="error").stdout
    assert "BATTEN_LOG_LEVEL=ERROR\n" in shown
