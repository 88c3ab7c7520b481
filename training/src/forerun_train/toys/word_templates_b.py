"""Word problems, second half: fuel, recipes, averages, tanks, classes, coins. One function a kind.

Each gives (question, solution lines, answer).
"""

from __future__ import annotations

from typing import Final

from forerun_train.toys.word_templates_a import Parts, Template
from forerun_train.toys.word_text import Draw, minus, over, plus, times


def fuel(d: Draw) -> Parts:
    p, unit = d.person(), d.pick("gallon", "liter")
    per, k, price = d.n(8, 40), d.n(2, 12), d.n(2, 7)
    way = per * k
    q = d.pick(
        f"{p.name}'s car goes {per} miles on one {unit} of fuel. A {unit} costs ${price}. How much does the fuel for "
        f"{way} miles cost?",
        f"Fuel costs ${price} per {unit}, and a car drives {per} miles per {unit}. {p.name} drives {way} miles. "
        f"How many dollars does {p.he} spend on fuel?",
    )
    lines = [
        f"The trip takes {over(way, per)} {unit}s.",
        f"That costs {times(k, price)} dollars.",
        f"So the fuel costs ${k * price}.",
    ]
    return q, lines, k * price


def recipe(d: Draw) -> Parts:
    p = d.person()
    dish = d.pick("soup", "salad", "stew", "pasta", "curry", "punch")
    what = d.pick(
        "cups of water",
        "spoons of oil",
        "carrots",
        "potatoes",
        "onions",
        "tomatoes",
        "cups of rice",
    )
    base, cups, k = d.n(2, 8), d.n(2, 12), d.n(2, 9)
    q = d.pick(
        f"A {dish} for {base} people needs {cups} {what}. How many {what} does {p.name} need for {base * k} people?",
        f"{p.name} uses {cups} {what} to make {dish} for {base} people. How many {what} does {p.he} use for {base * k} "
        f"people?",
    )
    lines = [
        f"{base * k} people are {over(base * k, base)} times as many.",
        f"So multiply: {times(cups, k)}.",
        f"So {p.name} needs {cups * k} {what}.",
    ]
    return q, lines, cups * k


def trading(d: Draw) -> Parts:
    (p, r, s), x = d.people(3), d.thing()
    start, lost, won = d.n(20, 90), d.n(3, 19), d.n(3, 40)
    a = start - lost
    b = a + won
    k = d.pick(*[k for k in (1, 2, 3, 4, 5) if b % k == 0])
    if k == 1:
        return trading(d)
    part = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}[k]
    gone, end = b // k, b - b // k
    q = d.pick(
        f"{p.name} has {start} {x.many}. {p.He} loses {lost}, then gets {won} from {r.name}, and finally gives {part} of "
        f"all {p.his} {x.many} to {s.name}. How many {x.many} does {p.name} keep?",
        f"From {start} {x.many}, {p.name} throws away {lost}. Then {r.name} gives {p.him} {won}. After that {p.name} "
        f"hands {part} of them to {s.name}. How many {x.many} does {p.he} have at the end?",
    )
    lines = [
        f"First {p.name} is left with {minus(start, lost)} {x.many}.",
        f"With those from {r.name} {p.he} has {plus(a, won)}.",
        f"{s.name} gets {over(b, k)}.",
        f"{p.name} keeps {minus(b, gone)}.",
        f"So {p.name} has {end} {x.many} at the end.",
    ]
    return q, lines, end


def tickets(d: Draw) -> Parts:
    p, place = (
        d.person(),
        d.pick("zoo", "museum", "circus", "fair", "cinema", "aquarium", "castle", "show"),
    )
    big, small = d.n(6, 25), d.n(2, 9)
    a, c = d.n(2, 6), d.n(2, 9)
    total = big * a + small * c
    q = d.pick(
        f"A ticket for the {place} costs ${big} for adults and ${small} for children. {p.name} buys tickets for {a} "
        f"adults and {c} children. How much does {p.he} pay?",
        f"{p.name} takes {a} adults and {c} children to the {place}. Adults pay ${big} and children pay ${small}. "
        f"How many dollars do all the tickets cost?",
    )
    lines = [
        f"The adults cost {times(big, a)} dollars.",
        f"The children cost {times(small, c)} dollars.",
        f"Together that is {plus(big * a, small * c)} dollars.",
        f"So {p.name} pays ${total}.",
    ]
    return q, lines, total


def average(d: Draw) -> Parts:
    p, what = d.person(), d.pick("points", "goals", "miles", "pages", "laps", "words", "hits")
    k, mean = d.pick(3, 4), d.n(6, 40)
    parts = [d.n(max(1, mean - 5), mean + 5) for _ in range(k - 1)]
    last = k * mean - sum(parts)
    if last < 1:
        return average(d)
    parts.append(last)
    listed = ", ".join(map(str, parts[:-1])) + f" and {last}"
    q = d.pick(
        f"In {k} rounds {p.name} gets {listed} {what}. What is the average number of {what} per round?",
        f"{p.name} counts {what} on {k} days: {listed}. How many {what} is that per day on average?",
    )
    lines = [
        f"Add them: {plus(*parts)}.",
        f"Divide by {k}: {over(k * mean, k)}.",
        f"So the average is {mean} {what}.",
    ]
    return q, lines, mean


def tank(d: Draw) -> Parts:
    what = d.pick("tank", "pool", "barrel", "tub", "pond")
    start, leak, t = d.n(5, 90), d.n(2, 7), d.n(3, 12)
    rate = leak + d.n(2, 20)
    net = rate - leak
    end = start + net * t
    q = d.pick(
        f"A {what} holds {start} liters of water. Every minute {rate} liters flow in and {leak} liters leak out. "
        f"How many liters are in the {what} after {t} minutes?",
        f"Water runs into a {what} at {rate} liters a minute, but {leak} liters a minute are lost. At first there are "
        f"{start} liters. How much water is in the {what} after {t} minutes?",
    )
    lines = [
        f"Each minute the water grows by {minus(rate, leak)} liters.",
        f"In {t} minutes that is {times(net, t)} liters.",
        f"With the water at the start: {plus(start, net * t)}.",
        f"So the {what} holds {end} liters.",
    ]
    return q, lines, end


def class_percent(d: Draw) -> Parts:
    group = d.pick(
        "students in a school", "people in an office", "children in a camp", "guests in a hotel"
    )
    who = group.split()[0]
    ten, tenths, cut = d.n(3, 30), d.n(1, 8), d.n(2, 9)
    total = ten * 10
    walk = tenths * ten
    rest = total - walk
    if cut >= rest:
        return class_percent(d)
    q = d.pick(
        f"There are {total} {group}. {10 * tenths}% of them walk, {cut} come by bike and the others take the bus. "
        f"How many {who} take the bus?",
        f"Of {total} {group}, {10 * tenths}% come on foot and {cut} by bike. The rest come by bus. "
        f"How many {who} come by bus?",
    )
    lines = [f"10% of {total} is {over(total, 10)}."]
    if tenths > 1:
        lines.append(f"{10 * tenths}% of {total} is {times(tenths, ten)}.")
    lines += [
        f"The others are {minus(total, walk)}.",
        f"Without the bikes that is {minus(rest, cut)}.",
        f"So {rest - cut} {who} take the bus.",
    ]
    return q, lines, rest - cut


def spend_half(d: Draw) -> Parts:
    p, (x,) = d.person(), d.goods(1)
    k = d.pick(2, 3, 4, 5)
    left, price = d.n(3, 40), d.n(2, 30)
    rest = left + price
    if rest % (k - 1):
        return spend_half(d)
    total = rest // (k - 1) * k
    gone = total // k
    part = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}[k]
    q = d.pick(
        f"{p.name} has ${total}. {p.He} spends {part} of it on food and then ${price} on a {x.one}. "
        f"How much money does {p.he} have left?",
        f"From ${total}, {p.name} pays {part} for rent. Then {p.he} buys a {x.one} for ${price}. "
        f"How many dollars remain?",
    )
    lines = [
        f"First {p.name} spends {over(total, k)} dollars.",
        f"Then {p.he} has {minus(total, gone)} dollars.",
        f"After the {x.one} there are {minus(rest, price)} dollars.",
        f"So {p.name} has ${left} left.",
    ]
    return q, lines, left


def coins(d: Draw) -> Parts:
    p = d.person()
    a, b, c = d.n(2, 9), d.n(2, 12), d.n(2, 12)
    total = 25 * a + 10 * b + 5 * c
    q = d.pick(
        f"{p.name} has {a} quarters, {b} dimes and {c} nickels. How many cents is that?",
        f"In {p.his} pocket {p.name} finds {b} dimes, {c} nickels and {a} quarters. How many cents does {p.he} have?",
    )
    lines = [
        f"The quarters are {times(25, a)} cents.",
        f"The dimes are {times(10, b)} cents.",
        f"The nickels are {times(5, c)} cents.",
        f"Together that is {plus(25 * a, 10 * b, 5 * c)} cents.",
        f"So {p.name} has {total} cents.",
    ]
    return q, lines, total


def factory(d: Draw) -> Parts:
    x, who = d.thing(), d.pick("machine", "factory", "workshop", "robot", "printer")
    per, h, bad = d.n(12, 80), d.n(3, 12), d.n(2, 30)
    good = per * h - bad
    q = d.pick(
        f"A {who} makes {per} {x.many} an hour. It runs for {h} hours, and {bad} of the {x.many} are faulty. "
        f"How many good {x.many} are there?",
        f"In one hour a {who} produces {per} {x.many}. After {h} hours {bad} {x.many} are thrown away. "
        f"How many {x.many} remain?",
    )
    lines = [
        f"In {h} hours the {who} makes {times(per, h)} {x.many}.",
        f"Without the bad ones that is {minus(per * h, bad)}.",
        f"So there are {good} good {x.many}.",
    ]
    return q, lines, good


def way_to_school(d: Draw) -> Parts:
    p, place = (
        d.person(),
        d.pick("school", "work", "the gym", "the library", "the pool", "the office"),
    )
    unit = d.pick("miles", "kilometers")
    far, days, extra = d.n(2, 24), d.n(3, 6), d.n(2, 30)
    week = 2 * far * days
    q = d.pick(
        f"{p.name} lives {far} {unit} from {place} and goes there and back {days} days a week. On Sunday {p.he} rides "
        f"{extra} more {unit}. How many {unit} is that in a week?",
        f"The way to {place} is {far} {unit}. {p.name} goes there and returns on {days} days, and makes one extra trip of "
        f"{extra} {unit}. How many {unit} does {p.he} travel?",
    )
    lines = [
        f"There and back is {times(far, 2)} {unit}.",
        f"On {days} days that is {times(2 * far, days)} {unit}.",
        f"With the extra trip it is {plus(week, extra)} {unit}.",
        f"So {p.name} travels {week + extra} {unit}.",
    ]
    return q, lines, week + extra


def work_backwards(d: Draw) -> Parts:
    (p, r), x = d.people(2), d.thing()
    left, gave, lost = d.n(3, 50), d.n(3, 40), d.n(2, 20)
    total = left + gave + lost
    q = d.pick(
        f"{p.name} gives {gave} {x.many} to {r.name} and loses {lost}. Now {p.he} has {left} {x.many}. How many "
        f"{x.many} did {p.name} have at first?",
        f"After losing {lost} {x.many} and giving {r.name} {gave}, {p.name} has {left} {x.many} left. "
        f"With how many {x.many} did {p.he} start?",
    )
    lines = [
        f"Go back step by step. Before the loss there were {plus(left, lost)} {x.many}.",
        f"Before the gift there were {plus(left + lost, gave)} {x.many}.",
        f"So {p.name} had {total} {x.many} at first.",
    ]
    return q, lines, total


def split_bill(d: Draw) -> Parts:
    p, meal = (
        d.person(),
        d.pick("dinner", "lunch", "breakfast", "pizza", "a taxi ride", "a present"),
    )
    k, each, tip = d.n(2, 9), d.n(5, 30), d.n(2, 20)
    bill = k * each - tip
    if bill < 5:
        return split_bill(d)
    q = d.pick(
        f"{p.name} and {k - 1} friends share the cost of {meal}. The bill is ${bill} and they add a tip of ${tip}. "
        f"How much does each of them pay?"
        if k > 2
        else f"{p.name} and a friend share the cost of {meal}. The bill is ${bill} and they add a tip of ${tip}. "
        f"How much does each of them pay?",
        f"A group of {k} people pays ${bill} for {meal} and ${tip} for the tip. They split it equally. "
        f"How many dollars does each one pay?",
    )
    lines = [
        f"With the tip the cost is {plus(bill, tip)} dollars.",
        f"For {k} people that is {over(bill + tip, k)} dollars each.",
        f"So each one pays ${each}.",
    ]
    return q, lines, each


def truck_load(d: Draw) -> Parts:
    who = d.pick("truck", "van", "ship", "cart", "lift", "train")
    a, w, b, v, room = d.n(3, 12), d.n(5, 40), d.n(3, 12), d.n(5, 40), d.n(5, 150)
    load = a * w + b * v
    limit = load + room
    q = d.pick(
        f"A {who} can carry {limit} kilograms. It is loaded with {a} boxes of {w} kilograms and {b} boxes of {v} "
        f"kilograms. How many more kilograms can it carry?",
        f"{a} boxes weigh {w} kilograms each and {b} boxes weigh {v} kilograms each. They are put on a {who} that carries "
        f"at most {limit} kilograms. How many kilograms are still allowed?",
    )
    lines = [
        f"The first boxes weigh {times(a, w)} kilograms.",
        f"The other boxes weigh {times(b, v)} kilograms.",
        f"The load is {plus(a * w, b * v)} kilograms.",
        f"The {who} has room for {minus(limit, load)} kilograms.",
        f"So it can carry {room} more kilograms.",
    ]
    return q, lines, room


def plant_growth(d: Draw) -> Parts:
    p, plant = d.person(), d.pick("sunflower", "tree", "bush", "vine", "plant", "hedge", "bean")
    h, g, weeks = d.n(4, 60), d.n(2, 15), d.n(3, 12)
    cut = d.n(2, min(h + g * weeks - 2, 40))
    end = h + g * weeks - cut
    q = d.pick(
        f"{p.name}'s {plant} is {h} centimeters tall and grows {g} centimeters a week. After {weeks} weeks {p.he} cuts off "
        f"{cut} centimeters. How tall is the {plant} then?",
        f"A {plant} of {h} centimeters grows by {g} centimeters every week for {weeks} weeks. Then {p.name} trims {cut} "
        f"centimeters. How many centimeters tall is it now?",
    )
    lines = [
        f"In {weeks} weeks it grows {times(g, weeks)} centimeters.",
        f"Then it is {plus(h, g * weeks)} centimeters tall.",
        f"After the cut it is {minus(h + g * weeks, cut)} centimeters.",
        f"So the {plant} is {end} centimeters tall.",
    ]
    return q, lines, end


def three_days(d: Draw) -> Parts:
    p, x = d.person(), d.thing()
    verb, base = d.pick(
        ("sells", "sell"),
        ("bakes", "bake"),
        ("picks", "pick"),
        ("finds", "find"),
        ("makes", "make"),
    )
    one, k, more = d.n(5, 40), d.pick(2, 3), d.n(2, 20)
    two = k * one
    three = two + more
    total = one + two + three
    q = d.pick(
        f"On Monday {p.name} {verb} {one} {x.many}. On Tuesday {p.he} {verb} {'twice' if k == 2 else 'three times'} as "
        f"many, and on Wednesday {more} more than on Tuesday. How many {x.many} does {p.he} {base} in the three days?",
        f"{p.name} {verb} {one} {x.many} on the first day, {'twice' if k == 2 else 'three times'} as many on the second "
        f"day, and on the third day {more} more than on the second. How many {x.many} is that in total?",
    )
    lines = [
        f"On the second day it is {times(k, one)} {x.many}.",
        f"On the third day it is {plus(two, more)} {x.many}.",
        f"In total that is {plus(one, two, three)}.",
        f"So {p.name} {verb} {total} {x.many}.",
    ]
    return q, lines, total


def profit(d: Draw) -> Parts:
    p, x = d.person(), d.thing()
    k, cost = d.n(3, 30), d.n(2, 9)
    price = cost + d.n(1, 9)
    gain = (price - cost) * k
    if k > 12 and price > 12:
        return profit(d)
    q = d.pick(
        f"{p.name} buys {k} {x.many} for ${cost} each and sells all of them for ${price} each. How much profit does "
        f"{p.he} make?",
        f"{p.name} pays ${cost} for one {x.one} and sells it for ${price}. How many dollars does {p.he} earn with {k} "
        f"{x.many}?",
    )
    lines = [
        f"With one {x.one} {p.name} earns {minus(price, cost)} dollars.",
        f"With {k} {x.many} that is {times(price - cost, k)} dollars.",
        f"So {p.he} makes a profit of ${gain}.",
    ]
    return q, lines, gain


def packs_needed(d: Draw) -> Parts:
    p, x = d.person(), d.thing()
    box = d.box(not_like=x)
    k, size, have = d.n(2, 12), d.n(3, 12), d.n(2, 30)
    kids = d.n(3, 12)
    need = have + k * size
    if need % kids or need // kids < 2:
        return packs_needed(d)
    each = need // kids
    q = d.pick(
        f"{p.name} wants to give {each} {x.many} to each of {kids} children. {p.He} has {have} {x.many} and can buy "
        f"{box.many} of {size}. How many {box.many} does {p.he} need to buy?",
        f"Each of {kids} children should get {each} {x.many}. {p.name} already has {have}, and a {box.one} holds {size} "
        f"{x.many}. How many {box.many} must {p.he} buy?",
    )
    lines = [
        f"The children need {times(kids, each)} {x.many}.",
        f"{p.name} is missing {minus(need, have)} {x.many}.",
        f"That makes {over(need - have, size)} {box.many}.",
        f"So {p.name} needs to buy {k} {box.many}.",
    ]
    return q, lines, k


TEMPLATES: Final[tuple[Template, ...]] = (
    fuel,
    recipe,
    trading,
    tickets,
    average,
    tank,
    class_percent,
    spend_half,
    coins,
    factory,
    way_to_school,
    work_backwards,
    split_bill,
    truck_load,
    plant_growth,
    three_days,
    profit,
    packs_needed,
)
