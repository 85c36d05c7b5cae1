"""A scale that overflows the weights' type is refused before a worker sees it."""

from __future__ import annotations

import json

import pytest

from worker.protocol.peft import AdapterConfigError, parse_config


@pytest.mark.parametrize("alpha", [1e300, -1e300, 10**400, float("inf"), float("nan")])
def test_an_alpha_beyond_float32_is_refused(alpha: float) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    with pytest.raises(AdapterConfigError, match="lora_alpha"):
        parse_config(json.dumps(config).encode())
