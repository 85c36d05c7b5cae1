"""The tasks' generators and scorers."""

import itertools
import json
import random
from typing import Any

import pytest
from tasks import HELD_OUT_SEED, TASKS, Task, sql
from tasks.base import noisy

NAMES = tuple(TASKS)


@pytest.fixture(params=NAMES)
def task(request: pytest.FixtureRequest) -> Task:
    return TASKS[request.param]


def test_generate_is_deterministic(task: Task) -> None:
    assert task.generate(50, 3) == task.generate(50, 3)
    assert task.generate(50, 3) != task.generate(50, 4)


def test_generate_gives_distinct_examples(task: Task) -> None:
    assert len({example.user for example in task.generate(500, 1)}) == 500


def test_generate_refuses_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "INTENTS", sql.INTENTS[3:4])
    monkeypatch.setattr(sql, "TAIL", ("",))
    with pytest.raises(ValueError, match="distinct examples"):
        sql.generate(500, 1)


def test_train_and_held_out_share_no_example(task: Task) -> None:
    train = {example.user.lower() for example in task.generate(2000, 1)}
    held_out = {e.user.lower() for e in task.generate(300, HELD_OUT_SEED, heldout=True)}
    assert len(held_out) > 250
    assert not train & held_out


@pytest.mark.parametrize(("name", "key"), [("triage", "product"), ("products", "brand")])
def test_held_out_names_are_never_trained(name: str, key: str) -> None:
    def values(heldout: bool) -> set[Any]:
        examples = TASKS[name].generate(300, 5, heldout=heldout)
        return {json.loads(example.answer)[key] for example in examples} - {None}

    assert values(True)
    assert not values(True) & values(False)


def test_gold_answers_are_right(task: Task) -> None:
    for example in task.generate(100, HELD_OUT_SEED, heldout=True):
        assert task.score(example.answer, example.answer)
        assert task.score(f" {example.answer}\n", example.answer)


def test_corrupted_answers_are_wrong(task: Task) -> None:
    for example in task.generate(100, HELD_OUT_SEED, heldout=True):
        for text in ("", "null", example.answer[:-2], f"Sure! {example.answer}", example.user):
            assert not task.score(text, example.answer)


def test_answers_of_other_examples_are_wrong(task: Task) -> None:
    answers = sorted({example.answer for example in task.generate(150, 1)})
    for text, answer in itertools.pairwise(answers):
        assert not task.score(text, answer)


def test_answers_fit_the_token_limit(task: Task) -> None:
    """No token is longer than an ordinary word, and digits are one token each."""
    for example in task.generate(300, 1):
        assert len(example.answer) < 4 * task.MAX_TOKENS


def test_messages_are_system_then_user(task: Task) -> None:
    assert task.messages("hello") == [
        {"role": "system", "content": task.SYSTEM},
        {"role": "user", "content": "hello"},
    ]


@pytest.mark.parametrize("name", ["triage", "products"])
def test_one_wrong_field_is_wrong(name: str) -> None:
    task = TASKS[name]
    answer = task.generate(1, 9)[0].answer
    fields = json.loads(answer)
    for key in fields:
        assert not task.score(json.dumps({**fields, key: "other"}), answer)
        assert not task.score(json.dumps({k: v for k, v in fields.items() if k != key}), answer)
    assert not task.score(json.dumps({**fields, "extra": 1}), answer)


def test_json_is_strict_about_types_and_syntax_only() -> None:
    score = TASKS["products"].score
    answer = '{"price": 20.5, "in_stock": true, "color": null}'
    assert score('{"color":null,"price":20.50,"in_stock":true}', answer)
    for text in (
        '{"price": "20.5", "in_stock": true, "color": null}',
        '{"price": 20.5, "in_stock": 1, "color": null}',
        '{"price": 20.5, "in_stock": true, "color": NaN}',
        '{"price": 1, "price": 20.5, "in_stock": true, "color": null}',
        "{'price': 20.5, 'in_stock': True, 'color': None}",
        "[" * 100_000,
    ):
        assert not score(text, answer)


def test_sql_gold_rows_are_never_empty() -> None:
    for heldout in (False, True):
        for example in sql.generate(150, 2, heldout=heldout):
            for database in (11, 12):
                rows = sql.run(example.answer, database)
                assert rows
                assert rows != [(None,)]


def test_sql_is_scored_by_its_rows() -> None:
    answer = "SELECT name FROM customers WHERE plan = 'pro' AND city = 'Oslo'"
    assert sql.score("select name from customers where city='Oslo' and plan='pro';", answer)
    assert sql.score(f"{answer} ORDER BY name DESC", answer)
    assert not sql.score("SELECT name FROM customers WHERE plan = 'pro'", answer)
    assert not sql.score(f"{answer} LIMIT 1", answer)


def test_sql_order_counts_where_the_answer_orders() -> None:
    answer = "SELECT id FROM orders ORDER BY total DESC LIMIT 5"
    inner = f"SELECT id FROM ({answer})"
    assert sql.score(answer.lower(), answer)
    assert not sql.score(f"{inner} ORDER BY id", answer)


@pytest.mark.parametrize(
    "query",
    [
        "DROP TABLE orders",
        "SELECT 1; SELECT 2",
        "WITH x AS (SELECT 1) DELETE FROM orders",
        "PRAGMA query_only",
        "SELECT nothing FROM nowhere",
        "SELECT '\x00",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
    ],
)
def test_sql_that_is_no_plain_query_has_no_rows(query: str) -> None:
    assert sql.run(query, 11) is None


def test_noise_leaves_names_alone() -> None:
    rng = random.Random(0)
    texts = {noisy("Please return the Aurora Lamp.", rng, ["Aurora Lamp"]) for _ in range(200)}
    assert len(texts) > 3
    assert all("Aurora Lamp" in text for text in texts)
