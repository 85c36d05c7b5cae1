"""The engine without a server: prompts in, answers out.

    from worker.protocol.types import SamplingParams
    from worker.runtime.offline import OfflineEngine, Prompt

    with OfflineEngine("path/to/model") as engine:
        prompts = [
            Prompt("The capital of France is", SamplingParams(max_tokens=16)),
            Prompt([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=16)),
            Prompt("SELECT", SamplingParams(max_tokens=16), adapter="path/to/peft/adapter"),
        ]
        for answer in engine.generate(prompts):
            print(answer.error or answer.choices[0].text)

Prompts of any number and mix of adapters share the engine's steps. An adapter is a folder that
PEFT's `save_pretrained` wrote. What is wrong with one prompt fails that prompt alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from worker.adapters.folders import FolderSource
from worker.engine.engine import Engine
from worker.engine.errors import RequestRefused
from worker.engine.metrics import EngineStats
from worker.engine.outputs import EngineOutput, FailedOutput, FinishedOutput
from worker.protocol.errors import AdapterLoadError
from worker.protocol.types import Choice, RequestId, SamplingParams, TokenUsage
from worker.runtime.build import load_tokenizer, model_folder
from worker.runtime.build_hf import hf_engine
from worker.settings import EngineSettings

AHEAD = 4
"""Prompts are read this many times `max_sequences` ahead, so that any number of them may come."""
STALLED_SECONDS = 0.002

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`content` is text, token ids or chat messages (for the model's chat template)."""

    content: str | Sequence[int] | Sequence[Message]
    sampling: SamplingParams
    adapter: str | Path | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of prompt `index`: choices and usage, or why there are none."""

    index: int
    choices: tuple[Choice, ...] = ()
    usage: TokenUsage | None = None
    error: str | None = None


class PromptRefused(Exception):
    """A prompt that cannot be made into tokens; the message says why."""


class OfflineEngine:
    """One model on this process's device. Not thread-safe; `close` it, or use it in a `with`."""

    def __init__(self, model: str | EngineSettings) -> None:
        """Raises ModelUnusable."""
        settings = EngineSettings(model=model) if isinstance(model, str) else model
        self._folder = model_folder(settings.model)
        self._tokenizer = load_tokenizer(self._folder)
        self._adapters = FolderSource()
        built = hf_engine(settings, self._folder, self._adapters.for_model)
        self.engine: Engine = built.engine
        self._close = built.close
        self._templates: Any = None

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._close()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def generate(
        self, prompts: Sequence[Prompt], *, progress: Callable[[Answer], None] | None = None
    ) -> list[Answer]:
        """Answers in the order of the prompts. `progress` hears of each as it is complete."""
        answers: dict[int, Answer] = {}
        for answer in self.stream(prompts):
            answers[answer.index] = answer
            if progress is not None:
                progress(answer)
        return [answers[index] for index in range(len(prompts))]

    def stream(self, prompts: Iterable[Prompt]) -> Iterator[Answer]:
        """Answers as they come; `prompts` is read only as far ahead as keeps the engine busy."""
        source = enumerate(prompts)
        waiting: dict[RequestId, int] = {}
        most = AHEAD * self.engine.config.max_sequences
        try:
            while True:
                for index, prompt in islice(source, most - len(waiting)):
                    request_id = RequestId(f"prompt-{index}")
                    error = self._add(request_id, prompt)
                    if error is not None:
                        yield Answer(index, error=error)
                    else:
                        waiting[request_id] = index
                if not waiting:
                    return
                yield from self._step(waiting)
        finally:
            self.engine.cancel(list(waiting))

    def _add(self, request_id: RequestId, prompt: Prompt) -> str | None:
        """Why the prompt is refused, if it is."""
        try:
            tokens = self._tokens(prompt.content)
            adapter = None if prompt.adapter is None else self._adapters.add(Path(prompt.adapter))
            self.engine.add(request_id, tokens, prompt.sampling, adapter=adapter, stream=False)
        except (PromptRefused, RequestRefused, AdapterLoadError) as error:
            return str(error)
        return None

    def _step(self, waiting: dict[RequestId, int]) -> Iterator[Answer]:
        for output in self.engine.step():
            answer = _answer(output, waiting)
            if answer is not None:
                del waiting[output.request_id]
                yield answer
        if self.engine.stalled:
            time.sleep(STALLED_SECONDS)

    def _tokens(self, content: str | Sequence[int] | Sequence[Message]) -> Sequence[int]:
        if isinstance(content, str):
            ids: list[int] = self._tokenizer.encode(content).ids
            return ids
        if content and isinstance(content[0], Mapping):
            return self._chat(content)
        tokens = [token for token in content if isinstance(token, int)]
        if len(tokens) != len(content) or not all(0 <= t < self._vocabulary() for t in tokens):
            raise PromptRefused("a prompt's token ids must be of the model's vocabulary")
        return tokens

    def _chat(self, messages: Sequence[Any]) -> Sequence[int]:
        if self._templates is None:
            self._templates = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        try:
            text = self._templates.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template raises whatever it likes
            raise PromptRefused(f"the chat template refuses the messages: {error}") from error
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def _vocabulary(self) -> int:
        return self._tokenizer.get_vocab_size()


def _answer(output: EngineOutput, waiting: Mapping[RequestId, int]) -> Answer | None:
    index = waiting.get(output.request_id)
    if index is None:
        return None
    if isinstance(output, FinishedOutput):
        return Answer(index, output.choices, output.usage)
    if isinstance(output, FailedOutput):
        return Answer(index, error=f"{output.code}: {output.message}")
    return None
