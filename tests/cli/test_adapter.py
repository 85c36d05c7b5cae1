"""`batten adapter`: from a folder to a revision that serves, without API or Redis."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from gateway.adapters.base_models import register_base_model
from gateway.cli.edge import describe
from gateway.cli.root import root
from gateway.kit.database import Database
from gateway.kit.migrations import migrate
from gateway.tenants.service import create_tenant

WIDTH = 8
PREFIX = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database with one base model and the tenant acme."""
    url = f"sqlite:///{tmp_path / 'batten.db'}"
    for name, value in {"DATABASE_URL": url, "BATTEN_DATA": str(tmp_path / "data")}.items():
        monkeypatch.setenv(name, value)
    for name in ("REDIS_URL", "BATTEN_STORE"):
        monkeypatch.delenv(name, raising=False)
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(config))
    weights = {f"{PREFIX}.weight": np.zeros((WIDTH, WIDTH), np.float32)}
    save_file(weights, str(model / "model.safetensors"))
    migrate(url)

    async def fill() -> None:
        database = Database(url)
        async with database.write() as session:
            await register_base_model(session, "base", str(model))
            await create_tenant(session, "acme")
        await database.close()

    asyncio.run(fill())
    return "acme"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A LoRA of rank 2 on the base model's one projection."""
    folder = tmp_path / "lora"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    tensors = {
        f"base_model.model.{PREFIX}.lora_A.weight": numbers.random((2, WIDTH), np.float32),
        f"base_model.model.{PREFIX}.lora_B.weight": numbers.random((WIDTH, 2), np.float32),
    }
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def batten(*args: str) -> str:
    result = CliRunner().invoke(root, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*args: str) -> str:
    result = CliRunner().invoke(root, args)
    assert result.exit_code == 1
    if isinstance(result.exception, SystemExit):
        return result.stderr
    assert isinstance(result.exception, Exception)
    return describe(result.exception)


def test_a_folder_becomes_a_revision_that_serves(tenant: str, folder: Path) -> None:
    assert batten("adapter", "add", tenant, "bot", str(folder)) == "bot@1\n"
    assert batten("adapter", "add", tenant, "bot", str(folder)) == "bot@2\n"
    listed = batten("adapter", "list", tenant)
    assert "bot" in listed
    assert " 1 " in listed  # the first ready revision stays promoted


def test_an_archive_is_taken_too(tenant: str, folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "my.adapter.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in folder.iterdir():
            packed.write(file, f"lora/{file.name}")
    assert batten("adapter", "add", tenant, "bot", str(archive)) == "bot@1\n"


def test_without_a_deployment_nothing_is_added(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    monkeypatch.setenv("BATTEN_DATA", str(data))
    monkeypatch.delenv("DATABASE_URL", raising=False)
    said = refused("adapter", "add", "acme", "bot", str(folder))
    assert "there is no deployment here" in said
    assert not data.exists()


def test_what_cannot_be_served_is_refused_with_the_reason(tenant: str, folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    said = refused("adapter", "add", tenant, "bot", str(folder))
    assert "bot is rejected: " in said
    assert "IA3" in said


@pytest.mark.parametrize(
    ("tenant_name", "name", "says"),
    [
        ("nobody", "bot", "No such tenant: 'nobody'"),
        ("acme", "../bot", "is no adapter name"),
        ("acme", "base", "is the name of a base model"),
    ],
)
def test_wrong_names(tenant: str, folder: Path, tenant_name: str, name: str, says: str) -> None:
    assert says in refused("adapter", "add", tenant_name, name, str(folder))


def test_a_folder_that_is_no_adapter(tenant: str, tmp_path: Path) -> None:
    said = refused("adapter", "add", tenant, "bot", str(tmp_path))
    assert "holds no adapter_config.json and no adapter_model.safetensors" in said


def test_inspect_says_what_a_folder_holds(tenant: str, folder: Path, tmp_path: Path) -> None:
    model = str(tmp_path / "model")
    said = batten("adapter", "inspect", str(folder), "--model", model)
    assert "rank       r 2, alpha 4" in said
    assert "2 tensors (2 F32)" in said
    assert "q_proj                   1     2  2        A, B" in said
    assert "features   none beyond plain LoRA" in said
    assert "served     yes, exactly" in said
    alone = batten("adapter", "inspect", str(folder))
    assert "not compared with a base model" in alone


def test_inspect_names_every_reason(tenant: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    changed = {**config, "use_rslora": True, "rank_pattern": {"q_proj": 4}}
    (folder / "adapter_config.json").write_text(json.dumps(changed))
    arguments = ["adapter", "inspect", str(folder), "--model", str(tmp_path / "model")]
    result = CliRunner().invoke(root, [*arguments, "--most-rank", "1"])
    assert result.exit_code == 1
    assert "use_rslora = true" in result.stdout
    assert "served     no, for 2 reasons" in result.stdout
    assert f"adapter_rank_mismatch: {PREFIX}: rank 2 in the file, 4 in the config" in result.stdout
    assert "adapter_rank_too_large" in result.stdout


@pytest.mark.parametrize("fields", [{"peft_type": "IA3"}, {"use_qalora": True}])
def test_inspect_of_options_that_are_refused(folder: Path, fields: dict[str, object]) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    result = CliRunner().invoke(root, ["adapter", "inspect", str(folder)])
    assert result.exit_code == 1
    assert "adapter_unsupported_option" in result.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "holds no adapter_config.json: not a PEFT folder"),
        ("{", "adapter_config.json cannot be read as JSON: "),
        ("[]", "adapter_config.json names no peft_type"),
        ('{"model_type": "llama"}', "adapter_config.json names no peft_type"),
    ],
)
def test_inspect_of_what_is_no_adapter(folder: Path, content: str | None, says: str) -> None:
    config = folder / "adapter_config.json"
    config.unlink()
    if content is not None:
        config.write_text(content)
    result = CliRunner().invoke(root, ["adapter", "inspect", str(folder)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: {folder}")
    assert says in result.stderr


def test_inspect_of_an_empty_folder_names_both_files(tmp_path: Path) -> None:
    said = refused("adapter", "inspect", str(tmp_path))
    assert "holds no adapter_config.json and no adapter_model.safetensors" in said


def test_inspect_says_what_a_config_names_and_no_more(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    (folder / "adapter_model.safetensors").unlink()
    result = CliRunner().invoke(root, ["adapter", "inspect", str(folder)])
    assert result.exit_code == 1
    assert "peft       IA3" in result.stdout
    assert "adapter_missing_file: adapter_model.safetensors" in result.stdout
    assert not {"None", "null"} & set(result.stdout.replace(",", " ").split())


def test_inspect_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom gateway.cli.root import root\n"
        "root(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'peft'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, "adapter", "inspect", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout


def test_verify_is_the_workers(request: pytest.FixtureRequest) -> None:
    command: Callable[..., subprocess.CompletedProcess[str]] = request.getfixturevalue("batten")
    said = command("adapter", "verify", "--help")
    assert said.returncode == 0, said.stderr
    assert "Compare the adapter in PEFT FOLDER with PEFT itself" in said.stdout
