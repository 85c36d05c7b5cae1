"""Product text to attributes: one JSON object with a fixed schema."""

import random
from decimal import Decimal

from .base import Example, chat, distinct, dump, is_held_out, noisy, number, same_json, side

NAME = "products"
SYSTEM = (
    "You read product texts for a catalogue. Reply with one JSON object and nothing else. "
    "Keys: brand, type, color, material, price (a number), in_stock (true or false). "
    "Use null for a color or a material that the text does not give."
)
MAX_TOKENS = 64

_STARTS = (
    "Nor", "Cal", "Mis", "Oka", "Bren", "Tes", "Hal", "Lu", "Ash", "Cor", "Fen", "Sor", "Van",
    "Kes", "Os", "Pil", "Ro", "Zeph",
)  # fmt: skip
_ENDS = (
    "vik", "der", "tral", "ri", "nan", "sel", "den", "mo", "by", "vo", "wick", "rel", "ta", "lio",
)  # fmt: skip
# With a handful of brands a model learns them by heart and misspells the next one it meets.
BRANDS = tuple(start + end for start in _STARTS for end in _ENDS)
# Materials by type, so that no text describes a wooden jacket.
TYPES: dict[str, tuple[str, ...]] = {
    "backpack": ("canvas", "leather", "nylon"),
    "jacket": ("cotton", "wool", "leather", "denim"),
    "lamp": ("steel", "glass", "brass", "oak"),
    "chair": ("oak", "steel", "bamboo", "plastic"),
    "mug": ("ceramic", "glass", "steel"),
    "scarf": ("wool", "silk", "cotton"),
    "table": ("oak", "glass", "bamboo"),
    "wallet": ("leather", "canvas", "nylon"),
    "blanket": ("wool", "cotton", "fleece"),
    "bottle": ("steel", "glass", "plastic"),
}
COLORS = ("black", "white", "red", "blue", "green", "grey", "yellow", "navy", "beige", "orange")

NAMING = (
    "{brand} {kind}{details}.",
    "The {brand} {kind}{details} is a classic.",
    "New from {brand}: a {kind}{details}.",
    "Meet the {kind} by {brand}{details}.",
    "{brand} presents its latest {kind}{details}.",
    "This {kind} comes from {brand}{details}.",
    "{kind} by {brand}{details}.",
)
PRICE = (
    "Price: {price} EUR.",
    "It costs {price} euros.",
    "Yours for {price} EUR.",
    "Now only {price} euros.",
    "Sold at EUR {price}.",
)
IN_STOCK = (
    "In stock.",
    "Ready to ship.",
    "Available now.",
    "We have it on the shelf.",
    "Ships today.",
)
OUT_OF_STOCK = (
    "Out of stock.",
    "Sold out.",
    "Currently unavailable.",
    "Back next month.",
    "Not available at the moment.",
)
ASIDE = (
    "",
    "",
    "It weighs {small} kg.",
    "With a warranty of {small} years.",
    "Loved by our customers.",
    "A perfect gift.",
    "Rated {small} out of 10.",
    "Designed for everyday use.",
    "Free delivery.",
)


def messages(user: str) -> list[dict[str, str]]:
    return chat(SYSTEM, user)


def generate(n: int, seed: int, *, heldout: bool = False) -> list[Example]:
    return distinct(n, seed, lambda rng: _draw(rng, heldout))


def score(text: str, answer: str) -> bool:
    return same_json(text, answer)


def _details(color: str | None, material: str | None, rng: random.Random) -> str:
    if color and material:
        shape = rng.choice((" in {c} {m}", ", {c} and made of {m}", " made of {m}, in {c}"))
        return shape.format(c=color, m=material)
    if color:
        return rng.choice((" in {c}", ", coloured {c}", ", {c}")).format(c=color)
    if material:
        return rng.choice((" made of {m}", " in {m}", ", {m}")).format(m=material)
    return ""


def _price(rng: random.Random, heldout: bool) -> Decimal:
    euros = number(rng, 5, 400, heldout)
    return Decimal(f"{euros}.{rng.choice(('50', '95', '99', '25'))}")


def _draw(rng: random.Random, heldout: bool) -> Example | None:
    naming, cost = rng.choice(NAMING), rng.choice(PRICE)
    in_stock = rng.random() < 0.5
    stock = rng.choice(IN_STOCK if in_stock else OUT_OF_STOCK)
    if is_held_out(naming, cost, stock) != heldout:
        return None
    brand = rng.choice(side(BRANDS, heldout))
    kind = rng.choice(tuple(TYPES))
    color = rng.choice(COLORS) if rng.random() < 0.75 else None
    material = rng.choice(TYPES[kind]) if rng.random() < 0.75 else None
    price = _price(rng, heldout)
    details = _details(color, material, rng)
    tail = [cost.format(price=price), stock, rng.choice(ASIDE)]
    rng.shuffle(tail)
    head = naming.format(brand=brand, kind=kind, details=details)
    text = " ".join(part for part in [head, *tail] if part)
    text = text.replace("{small}", str(rng.randrange(2, 10)))
    fields = {
        "brand": brand,
        "type": kind,
        "color": color,
        "material": material,
        "price": float(price),
        "in_stock": in_stock,
    }
    return Example(noisy(text, rng, [brand, kind, color or "", material or ""]), dump(fields))
