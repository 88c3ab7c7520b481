"""Short texts about everyday events, to work on."""

from __future__ import annotations

from forerun_train.prompts.draw import Draw

FIRST = (
    "On {day} morning, {person} left {place} to {activity}.",
    "{person}, a {job} from {place}, had planned for weeks to {activity}.",
    "In {month}, a {job} named {person} found {object} near {place}.",
    "It began with {object}.",
    "Nobody in {place} had expected that {person} would try to {activity}.",
    "The {job} opened the door at {n:5-11} o'clock and saw {object}.",
    "{person} and {person2} met in {place} to talk about {concept}.",
    "The town council of {place} discussed {concept} on {day}.",
    "A new cafe in {place} sells {food}, and {person} went there on {day}.",
    "Every {month}, the people of {place} celebrate {object} with {food}.",
)
NEXT = (
    "At first everything went well.",
    "A {job} told {person} to wait until {day}.",
    "The weather was bad, and the bus was {a:10-90} minutes late.",
    "{person2} brought {food} and a book about {concept}.",
    "That was more expensive than expected: it cost {b:12-480} dollars.",
    '"I have never been so {feeling}," said {person2}.',
    "Some people were {feeling}, others said that it did not matter.",
    "There were {c:20-900} visitors, most of them from {place2}.",
    "A {animal} ran across the street and everybody laughed.",
    "After {d:2-9} hours they decided to {activity2} instead.",
    "A {job2} explained how it had been done {e:20-90} years ago.",
    "In the afternoon, {person} was {feeling} and sat down beside {object2}.",
    "The report names {f:2-6} reasons, among them {concept2}.",
    "{person2} had read about it in the newspaper of {place2}.",
    "They talked about {things} until it was dark.",
    "Later, {person} learned that {person2} had once been a {job2}.",
    "The plan was changed {g:2-5} times because of {concept2}.",
    "For a moment nobody spoke.",
    '"Let us try again on {day2}," said the {job}.',
    "The children of the school wrote a {form} about it.",
)
LAST = (
    "In the end, {person} went home {feeling2}.",
    "They agreed to meet again in {month2}.",
    "The decision will be made on {day2}.",
    "Since then, {person} has never wanted to {activity} again.",
    "{person} kept {object2} as a memory of that day.",
    "That evening they ate {food} and laughed about it.",
    "A week later, everything was as before.",
    "It was the best day of the year for {person}.",
    "Nobody knows what happened to {object2}.",
    "The {job} said that it would be done again next year.",
)


def story(draw: Draw, sentences: int) -> str:
    """A text of so many sentences, at least 2, about one or two people."""
    middle = draw.some(NEXT, sentences - 2)
    parts = draw.fill("\n".join([draw.one(FIRST), *middle, draw.one(LAST)])).split("\n")
    return " ".join(part[:1].upper() + part[1:] for part in parts)
