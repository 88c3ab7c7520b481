"""Word problems, first half: shopping, sharing, distance, ages, parts. One function a kind.

Each gives (question, solution lines, answer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from forerun_train.toys.word_text import Draw, minus, over, plus, times

Parts = tuple[str, list[str], int]
Template = Callable[[Draw], Parts]


def shopping_total(d: Draw) -> Parts:
    p, (x, y, z) = d.person(), d.goods(3)
    a, b, c = d.n(3, 60), d.n(3, 60), d.n(3, 60)
    total = a + b + c
    q = d.pick(
        f"{p.name} buys a {x.one} for ${a}, a {y.one} for ${b} and a {z.one} for ${c}. How much does {p.he} spend?",
        f"At the store, a {x.one} costs ${a}, a {y.one} costs ${b} and a {z.one} costs ${c}. "
        f"{p.name} buys one of each. How many dollars does {p.he} pay in total?",
    )
    return (
        q,
        [f"Add the three prices: {plus(a, b, c)}.", f"So {p.name} spends ${total} in total."],
        total,
    )


def change_back(d: Draw) -> Parts:
    p, (x,) = d.person(), d.goods(1)
    k, a = d.n(2, 9), d.n(2, 19)
    cost = k * a
    bill = d.pick(*[b for b in (20, 50, 100, 200) if b > cost])
    q = d.pick(
        f"{p.name} buys {k} {x.many} that cost ${a} each. {p.He} pays with ${bill}. How much change does {p.he} get?",
        f"One {x.one} costs ${a}. {p.name} buys {k} of them and hands over ${bill}. "
        f"How many dollars does {p.he} get back?",
    )
    lines = [
        f"The {x.many} cost {times(k, a)} dollars.",
        f"The change is {minus(bill, cost)} dollars.",
        f"So {p.name} gets ${bill - cost} back.",
    ]
    return q, lines, bill - cost


def boxes_and_loose(d: Draw) -> Parts:
    p, x = d.person(), d.thing()
    box = d.box(not_like=x)
    k, a, m = d.n(3, 12), d.n(3, 24), d.n(2, 40)
    total = k * a + m
    q = d.pick(
        f"{p.name} has {k} {box.many} with {a} {x.many} in each. {p.He} also has {m} loose {x.many}. "
        f"How many {x.many} does {p.name} have in all?",
        f"There are {a} {x.many} in every {box.one}. {p.name} has {k} {box.many} and {m} more {x.many}. "
        f"How many {x.many} is that altogether?",
    )
    lines = [
        f"First count the {x.many} in the {box.many}: {times(k, a)}.",
        f"Then add the other {x.many}: {plus(k * a, m)}.",
        f"So {p.name} has {total} {x.many} in all.",
    ]
    return q, lines, total


def share_the_rest(d: Draw) -> Parts:
    (p, r), x = d.people(2), d.thing()
    k, each, gone = d.n(2, 9), d.n(3, 25), d.n(2, 30)
    total = k * each + gone
    q = d.pick(
        f"{p.name} has {total} {x.many}. {p.He} gives {gone} to {r.name} and shares the rest equally among {k} friends. "
        f"How many {x.many} does each friend get?",
        f"After giving {r.name} {gone} of {p.his} {total} {x.many}, {p.name} divides what is left equally between "
        f"{k} friends. How many {x.many} does every friend get?",
    )
    lines = [
        f"After giving some to {r.name}, {p.name} has {minus(total, gone)} {x.many} left.",
        f"Share them among {k} friends: {over(total - gone, k)}.",
        f"So each friend gets {each} {x.many}.",
    ]
    return q, lines, each


def two_legs(d: Draw) -> Parts:
    p, how = d.person(), d.pick("drives", "rides", "travels")
    v, t, w, u = d.n(12, 70), d.n(2, 6), d.n(12, 70), d.n(2, 6)
    total = v * t + w * u
    unit = d.pick("miles", "kilometers")
    q = d.pick(
        f"{p.name} {how} for {t} hours at {v} {unit} per hour and then for {u} hours at {w} {unit} per hour. "
        f"How many {unit} does {p.he} cover in total?",
        f"On a trip, {p.name} {how} {t} hours at a speed of {v} {unit} an hour. After a break {p.he} {how} {u} more "
        f"hours at {w} {unit} an hour. How long is the trip in {unit}?",
    )
    lines = [
        f"The first part is {times(v, t)} {unit}.",
        f"The second part is {times(w, u)} {unit}.",
        f"Together that is {plus(v * t, w * u)} {unit}.",
        f"So {p.name} covers {total} {unit}.",
    ]
    return q, lines, total


def pages_left(d: Draw) -> Parts:
    p = d.person()
    a, days = d.n(6, 35), d.n(3, 12)
    left = d.n(5, 120)
    total = a * days + left
    q = d.pick(
        f"{p.name} is reading a book with {total} pages. {p.He} reads {a} pages a day for {days} days. "
        f"How many pages are left?",
        f"A book has {total} pages. If {p.name} reads {a} pages every day, how many pages does {p.he} still have to read "
        f"after {days} days?",
    )
    lines = [
        f"In {days} days {p.name} reads {times(a, days)} pages.",
        f"That leaves {minus(total, a * days)} pages.",
        f"So {left} pages are left.",
    ]
    return q, lines, left


def ages(d: Draw) -> Parts:
    a, b, c = d.people(3)
    x, older, k = d.n(4, 15), d.n(2, 12), d.n(2, 4)
    y = x + older
    z = k * y
    total = x + y + z
    word = {2: "twice", 3: "three times", 4: "four times"}[k]
    q = d.pick(
        f"{a.name} is {x} years old. {b.name} is {older} years older than {a.name}, and {c.name} is {word} as old as "
        f"{b.name}. What is the sum of their ages?",
        f"{b.name} is {older} years older than {a.name}. {c.name} is {word} as old as {b.name}. "
        f"If {a.name} is {x} years old, how old are the three of them together?",
    )
    lines = [
        f"{b.name} is {plus(x, older)} years old.",
        f"{c.name} is {times(k, y)} years old.",
        f"Together they are {plus(x, y, z)} years old.",
        f"So the sum of their ages is {total}.",
    ]
    return q, lines, total


_PART = {
    2: "half",
    3: "a third",
    4: "a quarter",
    5: "a fifth",
    6: "a sixth",
    8: "an eighth",
    10: "a tenth",
}


def fraction_rest(d: Draw) -> Parts:
    p, x = d.person(), d.thing()
    k, part = d.pick(*_PART), d.n(3, 24)
    total = k * part
    color = d.pick("red", "blue", "green", "yellow", "broken", "old", "new", "small")
    q = d.pick(
        f"{p.name} has {total} {x.many}, and {_PART[k]} of them are {color}. How many of the {x.many} are not {color}?",
        f"Of {p.name}'s {total} {x.many}, {_PART[k]} are {color}. How many {x.many} are not {color}?",
    )
    lines = [
        f"The number of {color} {x.many} is {over(total, k)}.",
        f"The others are {minus(total, part)}.",
        f"So {total - part} {x.many} are not {color}.",
    ]
    return q, lines, total - part


def percent_off(d: Draw) -> Parts:
    p, (x,) = d.person(), d.goods(1)
    tenths, ten = d.n(1, 9), d.n(2, 30)
    price, off = 10 * ten, tenths * ten
    q = d.pick(
        f"A {x.one} costs ${price}. {p.name} gets a discount of {10 * tenths}%. How many dollars does {p.he} pay?",
        f"{p.name} wants a {x.one} for ${price}. In the sale it is {10 * tenths}% off. What does {p.he} pay now?",
    )
    lines = [f"10% of {price} is {over(price, 10)}."]
    if tenths > 1:
        lines.append(f"{10 * tenths}% of {price} is {times(tenths, ten)}.")
    lines += [f"The price is now {minus(price, off)} dollars.", f"So {p.name} pays ${price - off}."]
    return q, lines, price - off


def weekly_pay(d: Draw) -> Parts:
    p = d.person()
    h, days, wage, bonus = d.n(2, 9), d.n(3, 6), d.n(8, 25), d.n(10, 60)
    hours = h * days
    total = hours * wage + bonus if hours <= 12 or wage <= 12 else 0
    if not total:  # keep to products that one split can write out
        return weekly_pay(d)
    q = d.pick(
        f"{p.name} works {h} hours a day, {days} days a week, and earns ${wage} an hour. This week {p.he} also gets a "
        f"bonus of ${bonus}. How much does {p.he} earn this week?",
        f"For every hour of work {p.name} gets ${wage}. {p.He} works {h} hours on each of {days} days and then gets a "
        f"${bonus} bonus. How many dollars is that in all?",
    )
    lines = [
        f"{p.name} works {times(h, days)} hours.",
        f"For the hours {p.he} gets {times(hours, wage)} dollars.",
        f"With the bonus that is {plus(hours * wage, bonus)} dollars.",
        f"So {p.name} earns ${total}.",
    ]
    return q, lines, total


def saving_weeks(d: Draw) -> Parts:
    p, (x,) = d.person(), d.goods(1)
    s, weeks, have = d.n(3, 15), d.n(3, 20), d.n(5, 60)
    goal = s * weeks + have
    q = d.pick(
        f"{p.name} wants to buy a {x.one} that costs ${goal}. {p.He} has ${have} and saves ${s} every week. "
        f"How many weeks does {p.he} need?",
        f"A {x.one} costs ${goal}. {p.name} already has ${have}. If {p.he} puts aside ${s} a week, in how many weeks can "
        f"{p.he} buy it?",
    )
    lines = [
        f"{p.name} still needs {minus(goal, have)} dollars.",
        f"At ${s} a week that takes {over(goal - have, s)} weeks.",
        f"So {p.name} needs {weeks} weeks.",
    ]
    return q, lines, weeks


def empty_seats(d: Draw) -> Parts:
    place = d.pick("hall", "theater", "cinema", "stadium", "classroom", "church", "tent")
    rows, seats = d.n(5, 12), d.n(6, 30)
    taken = d.n(4, rows * seats - 2)
    free = rows * seats - taken
    q = d.pick(
        f"A {place} has {rows} rows of {seats} seats. {taken} seats are taken. How many seats are free?",
        f"There are {rows} rows with {seats} seats each in the {place}. If {taken} people sit down, how many seats stay "
        f"empty?",
    )
    lines = [
        f"The {place} has {times(rows, seats)} seats.",
        f"Take away the seats in use: {minus(rows * seats, taken)}.",
        f"So {free} seats are free.",
    ]
    return q, lines, free


def baking(d: Draw) -> Parts:
    p = d.person()
    what = d.pick("eggs", "cups of flour", "spoons of sugar", "apples", "lemons", "bananas")
    cake = d.pick("cake", "pie", "batch of muffins", "loaf of bread", "batch of cookies")
    many = cake.replace("batch", "batches") if "batch" in cake else cake.replace("loaf", "loaves")
    many = many if "batches" in many or "loaves" in many else many + "s"
    k, c = d.n(2, 9), d.n(3, 15)
    have = d.n(2, k * c - 2)
    need = k * c - have
    q = d.pick(
        f"{p.name} needs {k} {what} for one {cake}. {p.He} wants to bake {c} {many} and has {have} {what}. "
        f"How many more {what} does {p.he} need?",
        f"A {cake} takes {k} {what}. {p.name} plans to make {c} {many} but has only {have} {what}. "
        f"How many {what} are missing?",
    )
    lines = [
        f"For {c} {many} {p.name} needs {times(k, c)} {what}.",
        f"The missing number is {minus(k * c, have)}.",
        f"So {p.he} needs {need} more {what}.",
    ]
    return q, lines, need


_TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


def compare_three(d: Draw) -> Parts:
    (a, b, c), x, verb = d.people(3), d.thing(), d.pick("has", "collects", "finds")
    n, k, less = d.n(4, 30), d.pick(*_TIMES), d.n(2, 7)
    y, z = k * n, k * n - less
    total = n + y + z
    q = d.pick(
        f"{a.name} {verb} {n} {x.many}. {b.name} {verb} {_TIMES[k]} as many as {a.name}, and {c.name} {verb} {less} "
        f"fewer than {b.name}. How many {x.many} is that in total?",
        f"{b.name} {verb} {_TIMES[k]} as many {x.many} as {a.name}. {c.name} {verb} {less} {x.many} fewer than {b.name}. "
        f"{a.name} {verb} {n}. How many {x.many} are there altogether?",
    )
    lines = [
        f"{b.name} {verb} {times(k, n)} {x.many}.",
        f"{c.name} {verb} {minus(y, less)} {x.many}.",
        f"Together that is {plus(n, y, z)}.",
        f"So there are {total} {x.many} in total.",
    ]
    return q, lines, total


def bus_stops(d: Draw) -> Parts:
    what = d.pick("bus", "train", "tram", "boat", "ferry")
    n, off, on = d.n(12, 60), d.n(2, 10), d.n(2, 15)
    off2 = d.n(2, 12)
    m = n - off
    end = m + on - off2
    if end < 2:
        return bus_stops(d)
    q = d.pick(
        f"A {what} starts with {n} people. At the first stop {off} get off and {on} get on. At the second stop {off2} "
        f"get off. How many people are on the {what} now?",
        f"There are {n} passengers on a {what}. First {off} of them leave and {on} new ones come in. Later {off2} more "
        f"leave. How many passengers are on the {what} then?",
    )
    lines = [
        f"After {off} leave there are {minus(n, off)} people.",
        f"After {on} come in there are {plus(m, on)} people.",
        f"After {off2} leave there are {minus(m + on, off2)} people.",
        f"So {end} people are on the {what}.",
    ]
    return q, lines, end


def animal_legs(d: Draw) -> Parts:
    p = d.person()
    two, four = (
        d.pick("chickens", "ducks", "geese", "turkeys"),
        d.pick("cows", "sheep", "goats", "horses", "pigs"),
    )
    a, b = d.n(3, 40), d.n(3, 30)
    total = 2 * a + 4 * b
    q = d.pick(
        f"{p.name} has {a} {two} and {b} {four} on a farm. How many legs do the animals have in all?",
        f"On {p.name}'s farm there are {b} {four} and {a} {two}. How many legs is that altogether?",
    )
    lines = [
        f"The {two} have {times(a, 2)} legs.",
        f"The {four} have {times(b, 4)} legs.",
        f"Together that is {plus(2 * a, 4 * b)} legs.",
        f"So the animals have {total} legs.",
    ]
    return q, lines, total


def fence_cost(d: Draw) -> Parts:
    p, place = d.person(), d.pick("garden", "yard", "field", "park", "pool")
    w, k = d.n(3, 20), d.n(2, 9)
    length = w + d.n(1, 20)
    half = length + w
    around, cost = 2 * half, 2 * half * k
    q = d.pick(
        f"{p.name} has a rectangular {place} that is {length} meters long and {w} meters wide. A fence costs ${k} per "
        f"meter. How much does a fence all around the {place} cost?",
        f"A {place} is {length} meters by {w} meters. {p.name} puts a fence around it at ${k} a meter. "
        f"How many dollars does the fence cost?",
    )
    lines = [
        f"Length and width together are {plus(length, w)} meters.",
        f"All around it is {times(half, 2)} meters.",
        f"The fence costs {times(around, k)} dollars.",
        f"So the fence costs ${cost}.",
    ]
    return q, lines, cost


def tiles(d: Draw) -> Parts:
    p, room = d.person(), d.pick("kitchen", "bathroom", "hall", "cellar", "room")
    pack, a = d.pick(2, 3, 4, 5, 6), d.n(2, 5)
    length, w = pack * a, d.n(3, 12)
    packs = length * w // pack
    if length > 24:
        return tiles(d)
    q = d.pick(
        f"The floor of {p.name}'s {room} is {length} feet by {w} feet. One pack of tiles covers {pack} square feet. "
        f"How many packs does {p.he} need?",
        f"{p.name} tiles a {room} that is {length} feet long and {w} feet wide. A pack of tiles is enough for {pack} "
        f"square feet. How many packs are needed?",
    )
    lines = [
        f"The floor has {times(length, w)} square feet.",
        f"That takes {over(length * w, pack)} packs.",
        f"So {p.name} needs {packs} packs.",
    ]
    return q, lines, packs


def practice_hours(d: Draw) -> Parts:
    p, what = (
        d.person(),
        d.pick("the piano", "the violin", "chess", "the guitar", "tennis", "dancing", "drawing"),
    )
    minutes, hours = d.pick(10, 12, 15, 20, 30, 40, 45), d.n(2, 9)
    if 60 * hours % minutes:
        return practice_hours(d)
    days = 60 * hours // minutes
    total = minutes * days
    verb = "practices"
    q = d.pick(
        f"{p.name} {verb} {what} for {minutes} minutes every day. How many hours does {p.he} practice in {days} days?",
        f"Every day {p.name} {verb} {what} for {minutes} minutes. How many hours is that after {days} days?",
    )
    small = minutes if days > minutes else days
    product = times(minutes, days) if small <= 12 else f"{minutes} * {days} = {total}"
    lines = [
        f"In {days} days that is {product} minutes.",
        f"One hour has 60 minutes: {over(total, 60)}.",
        f"So {p.name} practices for {hours} hours.",
    ]
    return q, lines, hours


def two_workers(d: Draw) -> Parts:
    (a, b), x = d.people(2), d.thing()
    verb, base = d.pick(
        ("packs", "pack"),
        ("sells", "sell"),
        ("paints", "paint"),
        ("sorts", "sort"),
        ("makes", "make"),
    )
    m, days = d.n(3, 20), d.n(3, 12)
    n = m + d.n(2, 15)
    diff = (n - m) * days
    unit = d.pick("hour", "day", "week")
    q = d.pick(
        f"{a.name} {verb} {n} {x.many} per {unit} and {b.name} {verb} {m} {x.many} per {unit}. How many more {x.many} "
        f"does {a.name} {base} than {b.name} in {days} {unit}s?",
        f"Each {unit} {a.name} {verb} {n} {x.many} while {b.name} {verb} only {m}. After {days} {unit}s, how many "
        f"{x.many} is {a.name} ahead?",
    )
    lines = [
        f"{a.name} {verb} {times(n, days)} {x.many}.",
        f"{b.name} {verb} {times(m, days)} {x.many}.",
        f"The difference is {minus(n * days, m * days)}.",
        f"So {a.name} is ahead by {diff} {x.many}.",
    ]
    return q, lines, diff


TEMPLATES: Final[tuple[Template, ...]] = (
    shopping_total,
    change_back,
    boxes_and_loose,
    share_the_rest,
    two_legs,
    pages_left,
    ages,
    fraction_rest,
    percent_off,
    weekly_pay,
    saving_weeks,
    empty_seats,
    baking,
    compare_three,
    bus_stops,
    animal_legs,
    fence_cost,
    tiles,
    practice_hours,
    two_workers,
)
