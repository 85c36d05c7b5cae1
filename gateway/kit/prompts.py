"""Prompts of a base model as token ids: its tokenizer and its chat template.

`transformers` would load torch, so the files are read directly: `tokenizer.json` by the
`tokenizers` library, the template by `gateway.kit.templates`. A test compares the ids with
`apply_chat_template`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from huggingface_hub import snapshot_download
from tokenizers import Tokenizer as FastTokenizer

from gateway.kit.generation_config import sampling_defaults
from gateway.kit.template_process import IsolatedTemplate, TemplateProcess
from gateway.kit.templates import ChatTemplate

_FILES = [
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    "generation_config.json",
]
_INLINE_CHARS = 4096


class PromptsUnavailable(Exception):
    """A base model's tokenizer cannot be loaded: names the source and what is missing."""


class NoChatTemplate(Exception):
    """The base model has no chat template: it completes text only."""


class Prompts:
    """Text and messages to ids, ids to text. Thread-safe."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        template: ChatTemplate | IsolatedTemplate | None,
        special_tokens: Mapping[str, str],
        stop_token_ids: tuple[int, ...] = (),
        sampling_defaults: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`stop_token_ids` end answers, as well as what ends the model's. `sampling_defaults`
        are of parameters that a request leaves out."""
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self.stop_token_ids = stop_token_ids
        self.sampling_defaults = sampling_defaults
        self._template = template
        self._bos = special_tokens.get("bos_token", "")
        self._byte_level = _is_byte_level(tokenizer)
        self.vocabulary: int = tokenizer.get_vocab_size(with_added_tokens=True)

    def of_adapter(self, format: Mapping[str, Any], process: TemplateProcess) -> Prompts:
        """As an adapter with that `PromptFormat` wants them: the same tokens, its own template."""
        tokens, source = format["special_tokens"], format["chat_template"]
        template = None if source is None else IsolatedTemplate(process, source, tokens)
        stop = format["stop_token_id"]
        return Prompts(
            self._tokenizer,
            template,
            self._special_tokens,
            () if stop is None else (stop,),
            self.sampling_defaults,
        )

    @property
    def is_isolated(self) -> bool:
        """Whether rendering waits for another process."""
        return isinstance(self._template, IsolatedTemplate)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Raises NoChatTemplate or TemplateRefused."""
        if self._template is None:
            raise NoChatTemplate
        return self._template.render(messages)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The template writes the special tokens, so encoding adds none."""
        text = self.render_chat(messages)
        return tuple(self._ids(text, add_special_tokens=False))

    def encode(self, text: str) -> tuple[int, ...]:
        """Plain text, with the special tokens that the tokenizer adds, and one BOS at most."""
        ids = self._ids(text, add_special_tokens=True)
        if self._bos and text.startswith(self._bos):
            bos = self._tokenizer.token_to_id(self._bos)
            if ids[:2] == [bos, bos]:
                del ids[0]
        return tuple(ids)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """As a batch of one: that lets other threads run, and computes no offsets."""
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    def token_text(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which need not be whole UTF-8 characters."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level and all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return self.token_text(token_id).encode()


class PromptsCatalogue:
    """Prompts by source, loaded once each, off the event loop. `neutral`: models' own sampling
    defaults are left alone."""

    def __init__(self, neutral: bool = False) -> None:
        self._neutral = neutral
        self._loaded: dict[str, Prompts] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def of(self, source: str) -> Prompts:
        """`source` is a local folder or a hub id. Raises PromptsUnavailable."""
        if source not in self._loaded:
            async with self._locks.setdefault(source, asyncio.Lock()):
                if source not in self._loaded:
                    self._loaded[source] = await asyncio.to_thread(
                        load_prompts, source, self._neutral
                    )
        return self._loaded[source]


def is_small(text_chars: int) -> bool:
    """Whether so much text is tokenised faster than a thread is woken."""
    return text_chars <= _INLINE_CHARS


def load_prompts(source: str, neutral: bool = False) -> Prompts:
    """Raises PromptsUnavailable."""
    folder = prompts_folder(source)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise PromptsUnavailable(f"{source}: tokenizer.json is missing; only fast tokenizers work")
    try:
        tokenizer = FastTokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise PromptsUnavailable(f"{source}: tokenizer.json cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(folder / "tokenizer_config.json")
    special_tokens = special_tokens_of(config)
    text = template_text(folder, config)
    template = None if text is None else ChatTemplate(text, special_tokens)
    generation = {} if neutral else read_json(folder / "generation_config.json")
    defaults = sampling_defaults(generation, source)
    return Prompts(tokenizer, template, special_tokens, sampling_defaults=defaults)


def prompts_folder(source: str) -> Path:
    """Where the tokenizer's files lie, of a folder or a hub id. Raises PromptsUnavailable."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(source, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        raise PromptsUnavailable(f"{source}: not a folder, and not on the hub: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Empty where there is no file."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def template_text(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = read_json(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _is_byte_level(tokenizer: FastTokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    kinds = {decoder.get("type")} | {each.get("type") for each in decoder.get("decoders", [])}
    return "ByteLevel" in kinds


def _byte_of_char() -> dict[str, int]:
    """The printable stand-ins for bytes of GPT-2's byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
