"""Prompts about code: tasks from word lists, and functions of installed packages."""

from __future__ import annotations

from forerun_train.prompts.draw import Draw
from forerun_train.prompts.sources import Function, Sources

TASKS = (
    "returns the sum of all even numbers in a list",
    "counts the vowels in a string",
    "checks whether a word is a palindrome",
    "reverses the words of a sentence",
    "removes duplicates from a list and keeps the order",
    "finds the {n:2-9}th largest number of a list",
    "merges two sorted lists into one",
    "returns the first {n:5-30} Fibonacci numbers",
    "checks whether a number is prime",
    "computes the factorial of a number without recursion",
    "groups a list of words by their first letter",
    "converts a temperature from Celsius to Fahrenheit",
    "counts how often each word appears in a text",
    "flattens a nested list",
    "rotates a list by {n:2-9} places",
    "finds the longest word in a sentence",
    "converts a Roman numeral to an integer",
    "validates an email address with a regular expression",
    "reads a CSV file and returns its rows as dictionaries",
    "writes a dictionary to a JSON file",
    "returns the intersection of two lists",
    "splits a list into chunks of {n:2-9} elements",
    "transposes a matrix that is given as a list of lists",
    "multiplies two matrices without numpy",
    "generates a random password of {n:8-24} characters",
    "computes the greatest common divisor of two numbers",
    "searches a sorted list by bisection",
    "sorts a list of dictionaries by a key",
    "counts the lines of a file that contain a given word",
    "returns the current date as text in the form YYYY-MM-DD",
    "computes the distance between two points",
    "checks whether two words are anagrams",
    "encodes a text with a Caesar cipher that shifts by {n:2-12}",
    "turns snake_case names into CamelCase",
    "downloads a web page and returns its title",
    "prints a multiplication table up to {n:5-15}",
    "simulates {n:10-99} rolls of a die and returns the counts",
    "computes the median of a list of numbers",
    "finds all pairs of numbers in a list that add up to {n:10-99}",
    "evaluates a simple expression such as '2 + 3 * 4'",
)
ASKS = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}. Add a docstring and type hints.",
    "How do I write a function in Python that {task}?",
    "Show me short Python code that {task}, and explain each line.",
    "Write a JavaScript function that {task}.",
    "I need a function that {task}. Please also write {n:2-4} tests for it.",
    "Write a Python function that {task}. It should raise an error for bad input.",
    "Write a Python class with a method that {task}.",
    "Give me two different ways in Python to write a function that {task}.",
    "Write pseudocode, then Python code, for a function that {task}.",
)
ON_SOURCE = (
    "Explain what this Python function does:\n\n```python\n{source}\n```",
    "Write a docstring for this function.\n\n```python\n{bare}\n```",
    "What does the function `{name}` return, and when?\n\n```python\n{source}\n```",
    "Add type hints to this function.\n\n```python\n{bare}\n```",
    "Write a unit test for this function:\n\n```python\n{source}\n```",
    "Explain this code line by line.\n\n```python\n{bare}\n```",
    "Rename the variables so that the code is easier to read.\n\n```python\n{bare}\n```",
    "Are there inputs for which this function fails?\n\n```python\n{bare}\n```",
    "Summarize in one sentence what this code from `{module}` is for.\n\n```python\n{source}\n```",
    "Repeat this code, with a comment above every statement.\n\n```python\n{bare}\n```",
)
ON_PURPOSE = (
    "Write a Python function `{name}` for this purpose: {purpose}",
    'Complete this Python function.\n\n```python\n{signature}\n    """{purpose}"""\n```',
    'Here is a line of documentation: "{purpose}" Explain what it means for a beginner.',
    'The documentation of `{module}.{name}` says: "{purpose}" Show an example of its use.',
    "Suggest three other names for a function that is described as follows: {purpose}",
    "Implement this:\n\n```python\n{signature}\n```\n\nIt should do the following. {purpose}",
    "What are the parameters of this function, and what is each for?\n\n{signature}\n\n{purpose}",
    "In which situations would one need a function like this? {purpose}",
    "Write the body of `{name}` in Python. {purpose}",
    "Translate this documentation into a list of steps: {purpose}",
)


def code(draw: Draw, sources: Sources) -> list[str]:
    """The user's turns: one."""
    kind = draw.number(1, 10)
    if kind <= 3:
        return [draw.fill(draw.one(ASKS).replace("{task}", draw.one(TASKS)))]
    function = sources.function(draw.rng)
    return [_about(draw.one(ON_SOURCE if kind <= 7 else ON_PURPOSE), function)]


def _about(template: str, function: Function) -> str:
    for name in ("source", "bare", "name", "module", "signature", "purpose"):
        template = template.replace(f"{{{name}}}", "\0" + name + "\0")
    first, *rest = template.split("\0")
    names = vars(function)
    return first + "".join(names[part] if i % 2 == 0 else part for i, part in enumerate(rest))
