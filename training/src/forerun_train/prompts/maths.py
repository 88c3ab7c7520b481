"""Prompts about numbers: word problems, arithmetic and school mathematics."""

from __future__ import annotations

from forerun.evals.word_problems import TEST_SEEDS
from forerun_train.prompts.draw import Draw
from forerun_train.toys.word_problems import TRAIN_SEEDS, generate

ASKS = (
    "What is {sum}?", "Calculate {sum}.", "Compute {sum} and show your steps.", "{sum} = ?",
    "How much is {sum}? Explain how you get there.", "Work out {sum} step by step.",
    "Please evaluate {sum}.", "Solve: {sum}", "Tell me the result of {sum}.",
    "I need to know {sum}. Can you help?",
)  # fmt: skip
TASKS = (
    "Solve for x: {a:2-12}x + {b:1-40} = {c:41-160}",
    "Solve for x: {a:2-9}x - {b:1-40} = {c:10-90}",
    "What is {p:1-99}% of {n:20-900}?",
    "A price of ${n:20-400} is reduced by {p:5-60}%. What is the new price?",
    "Convert {n:2-90} hours into minutes.",
    "Convert {n:2-90} kilometers into meters.",
    "How many seconds are in {n:2-60} minutes?",
    "What is the perimeter of a rectangle with sides {a:2-60} cm and {b:2-60} cm?",
    "What is the area of a triangle with base {a:2-60} and height {b:2-60}?",
    "What is the area of a circle with radius {a:1-30}? Use 3.14 for pi.",
    "Is {n:10-500} a prime number? Explain why.",
    "List all divisors of {n:12-200}.",
    "What is the greatest common divisor of {a:12-180} and {b:12-180}?",
    "What is the least common multiple of {a:2-40} and {b:2-40}?",
    "Find the mean of {a:1-60}, {b:1-60}, {c:1-60} and {d:1-60}.",
    "Find the median of {a:1-60}, {b:1-60}, {c:1-60}, {d:1-60} and {e:1-60}.",
    "Sort these numbers in ascending order: {a:1-99}, {b:1-99}, {c:1-99}, {d:1-99}, {e:1-99}.",
    "What comes next in the sequence {a:1-9}, {b:10-19}, {c:20-29}, {d:30-39}? Explain your guess.",
    "Write {n:11-999} in words.",
    "Round {n:1000-9999} to the nearest hundred.",
    "Simplify the fraction {a:2-40}/{b:41-120}.",
    "Add the fractions 1/{a:2-12} and 1/{b:2-12}.",
    "A train travels {a:40-140} km per hour for {b:2-9} hours. How far does it go?",
    "If {person} has {a:5-60} coins and gives {b:1-5} to {person2}, how many are left?",
    "A box holds {a:6-24} eggs. How many boxes are needed for {b:30-400} eggs?",
    "{person} reads {a:5-40} pages a day. How long does a book of {b:100-900} pages take?",
    "The sum of two numbers is {a:20-90} and their difference is {b:2-18}. What are the numbers?",
    "A recipe for {a:2-6} people needs {b:100-800} g of flour. How much is needed for {c:7-20}?",
    "What is the probability of rolling a number above {a:1-5} with a fair die?",
    "Which is larger, {a:2-9}/{b:10-20} or {c:2-9}/{d:10-20}? Show how you compare them.",
)
FOLLOW_UPS = (
    "Can you check the result?", "Explain the second step again, please.",
    "How would you solve it in another way?", "What if the first number were twice as large?",
    "Write only the final answer.",
)  # fmt: skip


def maths(draw: Draw) -> list[str]:
    """The user's turns of a conversation about numbers."""
    kind = draw.number(1, 10)
    if kind <= 5:
        turns = [_word_problem(draw)]
    elif kind <= 7:
        turns = [draw.one(ASKS).replace("{sum}", _sum(draw))]
    else:
        turns = [draw.fill(draw.one(TASKS))]
    if draw.chance(0.12):
        turns.append(draw.one(FOLLOW_UPS))
    return turns


def _word_problem(draw: Draw) -> str:
    seeds = TEST_SEEDS if draw.held_out else TRAIN_SEEDS
    (problem,) = generate(draw.number(seeds.start, seeds.stop - 1), 1)
    return problem.question


def _sum(draw: Draw) -> str:
    size = draw.any((9, 20, 100, 100, 1000))  # type: ignore[arg-type]
    numbers = [str(draw.number(2, int(size))) for _ in range(draw.number(2, 4))]
    text = numbers[0]
    for number in numbers[1:]:
        text += f" {draw.any('++--*')} {number}"
    return f"({text}) * {draw.number(2, 9)}" if draw.chance(0.15) else text
