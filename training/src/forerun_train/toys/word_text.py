"""Words and written-out sums for the word problems: people, things, and arithmetic in small steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# fmt: off
_SHE = [
    "Ada", "Alice", "Amara", "Amy", "Anna", "Aria", "Ayla", "Bella", "Carla", "Chloe", "Clara",
    "Daisy", "Diana", "Elena", "Ella", "Emma", "Esther", "Eva", "Farah", "Fiona", "Freya", "Gina",
    "Grace", "Hana", "Hanna", "Helen", "Ines", "Irene", "Iris", "Ivy", "Jane", "Jasmin", "Julia",
    "Kaya", "Kim", "Laila", "Lara", "Lena", "Lily", "Lina", "Lucy", "Maria", "Maya", "Mei", "Mia",
    "Mila", "Mona", "Nadia", "Naomi", "Nina", "Nora", "Olga", "Olivia", "Paula", "Petra", "Priya",
    "Rosa", "Ruth", "Sara", "Sofia", "Tara", "Tess", "Uma", "Vera", "Wendy", "Yara", "Yuki", "Zoe",
    "Zara",
]
_HE = [
    "Aaron", "Adam", "Ahmed", "Alan", "Amir", "Andre", "Anton", "Arjun", "Ben", "Boris", "Bruno",
    "Carl", "Cesar", "Chen", "Daniel", "David", "Diego", "Dylan", "Eli", "Emil", "Eric", "Felix",
    "Finn", "Frank", "Gabriel", "George", "Hamid", "Hans", "Henry", "Hugo", "Ian", "Igor", "Ivan",
    "Jack", "Jamal", "James", "Jonas", "Juan", "Karl", "Kenji", "Leo", "Liam", "Luis", "Luke",
    "Malik", "Marco", "Mark", "Martin", "Max", "Mohamed", "Nico", "Noah", "Omar", "Oscar", "Otto",
    "Pablo", "Paul", "Peter", "Rafael", "Ravi", "Robert", "Sam", "Samir", "Simon", "Sven", "Theo",
    "Thomas", "Tom", "Umar", "Victor", "Walter", "Will", "Yusuf",
]

# singular|plural; things one can hold, buy, collect, give away
_THINGS = [
    "pen|pens", "pencil|pencils", "marble|marbles", "sticker|stickers", "stamp|stamps",
    "shell|shells", "button|buttons", "bead|beads", "card|cards", "coin|coins", "book|books",
    "comic|comics", "balloon|balloons", "candle|candles", "cookie|cookies", "apple|apples",
    "orange|oranges", "pear|pears", "plum|plums", "lemon|lemons", "peach|peaches", "muffin|muffins",
    "cupcake|cupcakes", "donut|donuts", "flower|flowers", "rose|roses", "tulip|tulips", "toy|toys",
    "block|blocks", "crayon|crayons", "eraser|erasers", "notebook|notebooks", "badge|badges",
    "rock|rocks", "feather|feathers", "postcard|postcards", "photo|photos", "ribbon|ribbons",
    "bottle|bottles", "cup|cups", "plate|plates", "spoon|spoons", "egg|eggs", "nut|nuts",
    "carrot|carrots", "potato|potatoes", "tomato|tomatoes", "onion|onions", "mango|mangoes",
    "banana|bananas", "melon|melons", "ticket|tickets", "magnet|magnets", "puzzle|puzzles",
    "key|keys", "sock|socks",
]
_GOODS = [
    "shirt|shirts", "hat|hats", "scarf|scarves", "bag|bags", "belt|belts", "lamp|lamps",
    "chair|chairs", "clock|clocks", "ball|balls", "kite|kites", "game|games", "jacket|jackets",
    "blanket|blankets", "towel|towels", "vase|vases", "mug|mugs", "basket|baskets",
    "umbrella|umbrellas", "backpack|backpacks", "wallet|wallets", "watch|watches", "puzzle|puzzles",
    "toy|toys", "poster|posters", "cap|caps",
]
_BOXES = [
    "box|boxes", "bag|bags", "basket|baskets", "jar|jars", "tray|trays", "pack|packs",
    "crate|crates", "bucket|buckets", "drawer|drawers",
]
# fmt: on


@dataclass(frozen=True)
class Noun:
    one: str
    many: str


@dataclass(frozen=True)
class Person:
    name: str
    he: str
    him: str
    his: str

    @property
    def He(self) -> str:
        return self.he.capitalize()


def _nouns(words: list[str]) -> list[Noun]:
    return [Noun(*w.split("|")) for w in words]


THINGS, GOODS, BOXES = _nouns(_THINGS), _nouns(_GOODS), _nouns(_BOXES)
PEOPLE = [Person(n, "she", "her", "her") for n in _SHE] + [
    Person(n, "he", "him", "his") for n in _HE
]


class Draw:
    """Random choices for one problem. Everything a template picks comes through here."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def n(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def pick(self, *options: T) -> T:
        return options[int(self.rng.random() * len(options))]

    def people(self, count: int) -> list[Person]:
        return self.rng.sample(PEOPLE, count)

    def person(self) -> Person:
        return self.pick(*PEOPLE)

    def thing(self) -> Noun:
        return self.pick(*THINGS)

    def goods(self, count: int) -> list[Noun]:
        return self.rng.sample(GOODS, count)

    def box(self, *, not_like: Noun | None = None) -> Noun:
        return self.pick(*[b for b in BOXES if b != not_like])


def plus(*terms: int) -> str:
    """``3 + 4 + 5 = 7 + 5 = 12``: one addition at a time, so that no step needs two."""
    parts = [" + ".join(map(str, terms))]
    left = list(terms)
    while len(left) > 1:
        left = [left[0] + left[1], *left[2:]]
        parts.append(" + ".join(map(str, left)))
    return " = ".join(parts)


def minus(a: int, b: int) -> str:
    return f"{a} - {b} = {a - b}"


def times(a: int, b: int) -> str:
    """``24 * 7 = 20 * 7 + 4 * 7 = 140 + 28 = 168``; small tables and round numbers at once."""
    big, small = (a, b) if a >= b else (b, a)
    tens, ones = big // 10 * 10, big % 10
    if big <= 12 or small == 1 or small == 10 or ones == 0:
        return f"{a} * {b} = {a * b}"
    return f"{a} * {b} = {tens} * {small} + {ones} * {small} = {tens * small} + {ones * small} = {a * b}"


def over(a: int, b: int) -> str:
    """``96 / 4 = 80 / 4 + 16 / 4 = 20 + 4 = 24``; only for exact divisions."""
    if a % b:
        raise ValueError(f"{a} / {b} is not a whole number")
    q = a // b
    tens, ones = q // 10 * 10, q % 10
    if q <= 12 or ones == 0 or b in (1, 10):
        return f"{a} / {b} = {q}"
    return f"{a} / {b} = {tens * b} / {b} + {ones * b} / {b} = {tens} + {ones} = {q}"
