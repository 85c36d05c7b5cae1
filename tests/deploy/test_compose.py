"""compose.yaml against itself and against the program it runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from gateway.cli.configuration import variable
from gateway.cli.root import root
from gateway.settings import Settings
from worker.__main__ import main as worker

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
GATEWAY = [name for name, service in SERVICES.items() if service["image"] == "batten-gateway"]
AWS = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
}
SERVICE_KEYS = {
    "image",
    "build",
    "command",
    "environment",
    "volumes",
    "ports",
    "healthcheck",
    "depends_on",
    "restart",
    "stop_grace_period",
}


def test_the_services_of_the_design_are_there() -> None:
    assert set(SERVICES) == {
        "postgres",
        "redis",
        "migrate",
        "api",
        "collector",
        "control",
        "worker",
    }


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_uses_only_known_keys(name: str) -> None:
    assert set(SERVICES[name]) <= SERVICE_KEYS
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"name", "services", "volumes"}


@pytest.mark.parametrize("name", GATEWAY)
def test_its_command_is_a_real_one(name: str) -> None:
    """Every word parses as the command's own; --help stops it before it does anything."""
    result = CliRunner().invoke(root, [*SERVICES[name]["command"], "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: root {SERVICES[name]['command'][0]}")


@pytest.mark.parametrize("name", GATEWAY)
def test_gateway_variables_are_settings(name: str) -> None:
    known = {variable(field) for field in Settings.model_fields}
    assert set(SERVICES[name]["environment"]) <= known | AWS


def test_worker_variables_are_options() -> None:
    known = {option.envvar for option in worker.params}
    assert set(SERVICES["worker"]["environment"]) <= known | AWS


@pytest.mark.parametrize("name", [*GATEWAY, "worker"])
def test_credentials_of_a_bucket_are_passed_on_where_they_are_set(name: str) -> None:
    """Without a value: compose leaves out what is not set, where an empty one would count."""
    environment = SERVICES[name]["environment"]
    assert {each: environment[each] for each in AWS} == dict.fromkeys(AWS)
    documented = (ROOT / "docs" / "storage.md").read_text()
    assert all(f"`{each}`" in documented for each in AWS)


def test_waiting_is_for_something_that_comes() -> None:
    for name, service in SERVICES.items():
        for other, wanted in service.get("depends_on", {}).items():
            condition = wanted["condition"]
            assert other in SERVICES, f"{name} waits for {other}"
            if condition == "service_healthy":
                assert SERVICES[other]["healthcheck"]["test"]
            else:
                assert condition == "service_completed_successfully"
                assert SERVICES[other]["restart"] == "on-failure"


def test_tables_and_redis_are_there_before_the_gateway() -> None:
    for name in set(GATEWAY) - {"migrate"}:
        assert set(SERVICES[name]["depends_on"]) == {"migrate", "redis"}


def test_named_volumes_are_declared_and_used() -> None:
    mounts = [
        m.rsplit(":", 1 + m.endswith(":ro"))[0]
        for s in SERVICES.values()
        for m in s.get("volumes", [])
    ]
    named = {mount for mount in mounts if not mount.startswith(("$", ".", "/"))}
    assert named == set(COMPOSE["volumes"])


def test_gateway_and_worker_share_store_queue_and_model() -> None:
    theirs = SERVICES["worker"]["environment"]
    ours = SERVICES["api"]["environment"]
    for name in ("REDIS_URL", "BATTEN_STORE", "BATTEN_MODEL", "BATTEN_MODEL_NAME", "BATTEN_DATA"):
        assert theirs[name] == ours[name]
    assert SERVICES["worker"]["volumes"] == SERVICES["api"]["volumes"]


def test_what_has_no_default_is_in_the_example() -> None:
    example = (ROOT / "deploy" / "env.example").read_text()
    given = set(re.findall(r"^([A-Z_]+)=", example, re.MULTILINE))
    required = set(re.findall(r"\$\{([A-Z_]+):\?", TEXT))
    used = set(re.findall(r"\$\{([A-Z_]+)", TEXT))
    assert required <= given <= used


def test_redis_keeps_what_it_accepted() -> None:
    command = SERVICES["redis"]["command"][-1]
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command


@pytest.mark.parametrize("kind", ["gateway", "worker"])
def test_images_are_made_from_what_is_here(kind: str) -> None:
    service = SERVICES["api" if kind == "gateway" else "worker"]
    dockerfile = ROOT / service["build"]["dockerfile"]
    text = dockerfile.read_text()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    assert f".[{kind}]" in text
    assert "\nUSER batten\n" in text
