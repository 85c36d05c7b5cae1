"""docs/adapters.md says what the code accepts."""

import json
import re
from pathlib import Path

import pytest

from tests.adapters.folders import CONFIG
from worker.protocol import peft

DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"
USED = {
    "r": 4,
    "lora_alpha": 8,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 8},
    "layers_to_transform": [0],
    "bias": "all",
    "target_parameters": ["mlp.experts.down_proj"],
    "alora_invocation_tokens": [1],
    "layer_replication": [[0, 1]],
    "trainable_token_indices": [5],
}
LISTS = {"target_modules", "exclude_modules", "layers_pattern", "modules_to_save"}


def rows():
    for line in DOCUMENT.read_text().splitlines():
        match = re.match(r"\| (`.*`) \| (served|refused) \|", line)
        if match:
            for option in re.findall(r"`(\w+)`", match[1]):
                yield option, match[2]


def used(option):
    if option in LISTS:
        return ["q_proj"]
    if option == "use_bdlora":
        return {"nblocks": 2, "target_modules_bd_b": ["q_proj"]}
    if option.endswith("_config"):
        return {"x": 1}
    return USED.get(option, True)


@pytest.mark.parametrize(("option", "state"), list(rows()))
def test_the_matrix_says_what_is_accepted(option, state):
    text = json.dumps({**CONFIG, option: used(option)})
    if state == "served":
        assert peft.parse_config(text).r == 4
    else:
        with pytest.raises(peft.AdapterConfigError) as error:
            peft.parse_config(text)
        assert (error.value.code, error.value.param) == ("adapter_unsupported_option", option)


def test_the_matrix_names_every_refused_option():
    from worker.protocol.peft_options import _UNSUPPORTED

    assert {option for option, state in rows() if state == "refused"} == set(_UNSUPPORTED)
