"""Question to SQL over one schema, scored by running both queries and comparing the rows."""

import random
import sqlite3
from collections import Counter
from contextlib import closing
from functools import lru_cache
from typing import NamedTuple

from .base import Example, chat, distinct, is_held_out, noisy, number, side

NAME = "sql"
SYSTEM = (
    "You write SQLite queries. Reply with one SELECT statement and nothing else. Tables: "
    "customers(id, name, city, plan), orders(id, customer_id, product, total, status, month). "
    "plan is free, pro or team; status is open, shipped or cancelled; month is 1 to 12."
)
MAX_TOKENS = 64

CITIES = (
    "Berlin", "Madrid", "Vienna", "Lisbon", "Oslo", "Prague", "Dublin", "Athens",
    "Warsaw", "Geneva", "Turin", "Lyon",
)  # fmt: skip
PLANS = ("free", "pro", "team")
STATUSES = ("open", "shipped", "cancelled")
PRODUCTS = (
    "lamp", "desk", "chair", "sofa", "rug", "shelf", "mirror", "clock",
    "vase", "stool", "bench", "bed",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ines", "Jon", "Kai", "Lea")
_DATABASES = (11, 12)
_STEP_LIMIT = 2_000_000
_FIRST_MONTH = 1


class Intent(NamedTuple):
    """One kind of question: its wordings and its query."""

    wordings: tuple[str, ...]
    query: str


INTENTS = (
    Intent(
        ("How many customers live in {city}?", "Number of customers in {city}",
         "Count the customers from {city}."),
        "SELECT COUNT(*) FROM customers WHERE city = '{city}'",
    ),
    Intent(
        ("Which customers are on the {plan} plan?", "Names of all {plan} plan customers",
         "List everyone on the {plan} plan."),
        "SELECT name FROM customers WHERE plan = '{plan}'",
    ),
    Intent(
        ("Which {plan} customers live in {city}?", "List the {plan} plan customers from {city}.",
         "Names of customers in {city} on the {plan} plan"),
        "SELECT name FROM customers WHERE city = '{city}' AND plan = '{plan}'",
    ),
    Intent(
        ("How many customers are there in each city?", "Customers per city",
         "Count the customers by city."),
        "SELECT city, COUNT(*) FROM customers GROUP BY city",
    ),
    Intent(
        ("How many {status} orders are there?", "Number of {status} orders",
         "Count the orders that are {status}."),
        "SELECT COUNT(*) FROM orders WHERE status = '{status}'",
    ),
    Intent(
        ("How many {product} orders were placed in {month}?",
         "Number of orders for a {product} in {month}", "Count the {month} orders of {product}."),
        "SELECT COUNT(*) FROM orders WHERE product = '{product}' AND month = {month_number}",
    ),
    Intent(
        ("What is the total of all {status} orders?", "Sum of the {status} orders",
         "How much are the {status} orders worth together?"),
        "SELECT SUM(total) FROM orders WHERE status = '{status}'",
    ),
    Intent(
        ("What is the average total of {product} orders?", "Average order total for {product}",
         "How much does a {product} order come to on average?"),
        "SELECT AVG(total) FROM orders WHERE product = '{product}'",
    ),
    Intent(
        ("Which orders are above {amount} euros?", "List the ids of orders over {amount} euros.",
         "Order ids with a total of more than {amount}"),
        "SELECT id FROM orders WHERE total > {amount}",
    ),
    Intent(
        ("Which {status} orders are below {amount} euros?",
         "Ids of {status} orders under {amount} euros",
         "List the {status} orders with a total of less than {amount}."),
        "SELECT id FROM orders WHERE status = '{status}' AND total < {amount}",
    ),
    Intent(
        ("What are the {few} biggest orders?", "Top {few} orders by total",
         "Ids of the {few} most expensive orders"),
        "SELECT id FROM orders ORDER BY total DESC LIMIT {few}",
    ),
    Intent(
        ("What did we sell in {month}?", "Total sales in {month}",
         "Sum of all orders in {month}"),
        "SELECT SUM(total) FROM orders WHERE month = {month_number}",
    ),
    Intent(
        ("How much did we sell in each month?", "Total sales per month",
         "Sum of the order totals by month"),
        "SELECT month, SUM(total) FROM orders GROUP BY month",
    ),
    Intent(
        ("Who ordered a {product}?", "Names of customers with a {product} order",
         "Which customers have ordered a {product}?"),
        "SELECT name FROM customers WHERE id IN "
        "(SELECT customer_id FROM orders WHERE product = '{product}')",
    ),
    Intent(
        ("What is the total of the orders from {city}?", "Sales to customers in {city}",
         "How much did customers in {city} spend?"),
        "SELECT SUM(total) FROM orders WHERE customer_id IN "
        "(SELECT id FROM customers WHERE city = '{city}')",
    ),
    Intent(
        ("Which customers have no orders?", "Names of customers without an order",
         "Who has never ordered anything?"),
        "SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)",
    ),
)  # fmt: skip
LEAD = ("", "", "", "Please tell me:", "Quick question.", "For the report:", "Hi,", "Hello!")
TAIL = ("", "", "", "Thanks!", "I need it for a meeting.", "My boss is asking.", "Thank you.")


def messages(user: str) -> list[dict[str, str]]:
    return chat(SYSTEM, user)


def generate(n: int, seed: int, *, heldout: bool = False) -> list[Example]:
    return distinct(n, seed, lambda rng: _draw(rng, heldout))


def score(text: str, answer: str) -> bool:
    """Whether both queries give the same rows on every test database.

    Rows count in order only where the answer has an ORDER BY.
    """
    ordered = "ORDER BY" in answer.upper()
    for seed in _DATABASES:
        found, wanted = run(text, seed), run(answer, seed)
        if found is None or wanted is None:
            return False
        if found != wanted if ordered else Counter(found) != Counter(wanted):
            return False
    return True


def run(query: str, database: int) -> list[tuple[object, ...]] | None:
    """The query's rows on one of the test databases; None where it fails or is no SELECT."""
    if not query.lstrip().upper().startswith(("SELECT", "WITH")):
        return None
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(_image(database))
        connection.execute("PRAGMA query_only = ON")
        budget = iter(range(_STEP_LIMIT // 1000))
        connection.set_progress_handler(lambda: int(next(budget, None) is None), 1000)
        try:
            rows = connection.execute(query).fetchall()
        except (sqlite3.Error, sqlite3.Warning):
            return None
    return [tuple(_rounded(value) for value in row) for row in rows]


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value


def _rows(seed: int) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """300 customers and 900 orders; no two orders have the same total."""
    rng = random.Random(seed)
    customers: list[tuple[object, ...]] = [
        (i, f"{_NAMES[i % 12]} {chr(65 + i // 12)}.", rng.choice(CITIES), rng.choice(PLANS))
        for i in range(1, 301)
    ]
    totals = rng.sample(range(10, 1000), 900)
    orders: list[tuple[object, ...]] = [
        (
            1000 + i,
            rng.randrange(1, 251),
            rng.choice(PRODUCTS),
            total,
            rng.choice(STATUSES),
            rng.randrange(1, 13),
        )
        for i, total in enumerate(totals)
    ]
    return customers, orders


@lru_cache
def _image(seed: int) -> bytes:
    """A test database as SQLite stores it, to be opened afresh for every query."""
    customers, orders = _rows(seed)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(
            "CREATE TABLE customers(id INTEGER PRIMARY KEY, name TEXT, city TEXT, plan TEXT);"
            "CREATE TABLE orders(id INTEGER PRIMARY KEY, customer_id INTEGER, product TEXT,"
            " total INTEGER, status TEXT, month INTEGER);"
        )
        connection.executemany("INSERT INTO customers VALUES (?, ?, ?, ?)", customers)
        connection.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", orders)
        connection.commit()
        return connection.serialize()


def _draw(rng: random.Random, heldout: bool) -> Example | None:
    intent = rng.choice(INTENTS)
    wording, lead, tail = rng.choice(intent.wordings), rng.choice(LEAD), rng.choice(TAIL)
    if is_held_out(wording, lead, tail) != heldout:
        return None
    month = rng.randrange(12)
    values = {
        "city": rng.choice(side(CITIES, heldout)),
        "plan": rng.choice(PLANS),
        "status": rng.choice(STATUSES),
        "product": rng.choice(side(PRODUCTS, heldout)),
        "month": MONTHS[month],
        "month_number": month + _FIRST_MONTH,
        "amount": number(rng, 60, 950, heldout),
        "few": number(rng, 2, 30, heldout),
    }
    question = noisy(wording.format_map(values), rng, [str(value) for value in values.values()])
    text = " ".join(part for part in (lead, question, tail) if part)
    return Example(text, intent.query.format_map(values))
