"""Support ticket to strict JSON: what it is about, how urgent, which product and order."""

import random

from .base import Example, chat, distinct, dump, is_held_out, noisy, number, same_json, side

NAME = "triage"
SYSTEM = (
    "You triage support tickets for an online shop. Reply with one JSON object and nothing else. "
    "Keys: category (shipping, returns, billing, account or technical), priority (low, normal or "
    "high), product, order_id, sentiment (positive, neutral or negative). "
    "Use null for a product or an order that is not named."
)
MAX_TOKENS = 64

PRODUCTS = (
    "Aurora Lamp", "Nimbus Kettle", "Drift Headphones", "Solace Mattress",
    "Pebble Speaker", "Falcon Drone", "Harbor Backpack", "Ember Heater",
    "Lumen Projector", "Quill Keyboard", "Tundra Jacket", "Orbit Watch",
    "Cedar Desk", "Velvet Sofa", "Glide Scooter", "Breeze Fan",
    "Summit Tent", "Ripple Router", "Crisp Toaster", "Mosaic Rug",
    "Anchor Bike", "Pulse Treadmill", "Echo Doorbell", "Flint Grill",
)  # fmt: skip

ISSUES: dict[str, tuple[str, ...]] = {
    "shipping": (
        "My {thing} has still not arrived.",
        "The tracking page for my {thing} has not moved for {days} days.",
        "The courier left my {thing} at the wrong address.",
        "When will my {thing} be delivered?",
        "The parcel with my {thing} was supposed to be here {days} days ago.",
        "Can you change the delivery address for my {thing}?",
    ),
    "returns": (
        "I want to send my {thing} back.",
        "How do I return the {thing} I bought?",
        "I would like to exchange my {thing} for another colour.",
        "Please email me a return label for the {thing}.",
        "The {thing} is not what I expected, so I am returning it.",
        "It has been {days} days since I returned the {thing} and I got no refund.",
    ),
    "billing": (
        "I was charged twice for my {thing}.",
        "The invoice for my {thing} shows the wrong amount.",
        "My card was billed for a {thing} I never bought.",
        "Please send me an invoice for the {thing}.",
        "The discount code was not applied when I paid for the {thing}.",
        "Why is there an extra fee of {days} euros on the bill for my {thing}?",
    ),
    "account": (
        "I cannot log in to register my {thing}.",
        "The password reset email never comes, so I cannot register the {thing}.",
        "How do I change the email address of my account, the one with the {thing}?",
        "Please delete my account, I no longer own the {thing}.",
        "My account has been locked for {days} days and I cannot see my {thing}.",
        "I forgot my username and cannot sign in to review the {thing}.",
    ),
    "technical": (
        "My {thing} does not turn on any more.",
        "The {thing} stopped working after {days} days.",
        "The {thing} makes a strange noise when I use it.",
        "A part of my {thing} broke off.",
        "My {thing} keeps switching itself off.",
        "How do I reset my {thing} after the last update?",
    ),
}
GENERIC = ("item", "purchase", "product")

PRIORITY: dict[str, tuple[str, ...]] = {
    "high": (
        "This is urgent.",
        "I need this solved today.",
        "Please help me as soon as possible.",
        "I need an answer right now.",
        "It cannot wait.",
    ),
    "normal": ("",),
    "low": (
        "There is no rush.",
        "Whenever you have time is fine.",
        "It is not urgent.",
        "Take your time.",
        "No hurry at all.",
    ),
}
SENTIMENT: dict[str, tuple[str, ...]] = {
    "negative": (
        "I am really annoyed.",
        "This is terrible service.",
        "I am very disappointed.",
        "I am fed up with your shop.",
        "What an awful experience.",
    ),
    "neutral": ("",),
    "positive": (
        "I love your shop.",
        "You have always been great.",
        "I am a happy customer.",
        "Your service is wonderful.",
        "I am very pleased with you so far.",
    ),
}
ORDER = (
    "My order number is {order}.",
    "Order {order}.",
    "It was order #{order}.",
    "(order no. {order})",
    "The order is {order}.",
)
GREETING = ("", "Hi,", "Hello,", "Hey there,", "Good morning,", "Dear team,")
ASIDE = (
    "", "", "",
    "I bought it as a gift.",
    "My neighbour told me to write to you.",
    "I am writing from my phone.",
    "I have been on holiday for {days} days.",
    "I live on the {days}th floor.",
)  # fmt: skip


def messages(user: str) -> list[dict[str, str]]:
    return chat(SYSTEM, user)


def generate(n: int, seed: int, *, heldout: bool = False) -> list[Example]:
    return distinct(n, seed, lambda rng: _draw(rng, heldout))


def score(text: str, answer: str) -> bool:
    return same_json(text, answer)


def _draw(rng: random.Random, heldout: bool) -> Example | None:
    category = rng.choice(tuple(ISSUES))
    priority = rng.choice(tuple(PRIORITY))
    sentiment = rng.choice(tuple(SENTIMENT))
    issue = rng.choice(ISSUES[category])
    hurry = rng.choice(PRIORITY[priority])
    mood = rng.choice(SENTIMENT[sentiment])
    if is_held_out(issue, hurry, mood) != heldout:
        return None
    product = rng.choice(side(PRODUCTS, heldout)) if rng.random() < 0.7 else None
    order = str(number(rng, 10_000, 100_000, heldout)) if rng.random() < 0.6 else None
    tail = [hurry, mood, rng.choice(ASIDE)]
    if order:
        tail.append(rng.choice(ORDER).format(order=order))
    rng.shuffle(tail)
    parts = [rng.choice(GREETING), issue, *tail]
    if rng.random() < 0.2:
        parts = [mood, *(part for part in parts if part != mood)]
    text = " ".join(part for part in parts if part)
    text = text.replace("{thing}", product or rng.choice(GENERIC))
    text = text.replace("{days}", str(rng.randrange(4, 20)))
    fields = {
        "category": category,
        "priority": priority,
        "product": product,
        "order_id": order,
        "sentiment": sentiment,
    }
    return Example(noisy(text, rng, [product or ""]), dump(fields))
