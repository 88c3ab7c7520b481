"""Prompts that ask for a piece of writing, or for work on a given text."""

from __future__ import annotations

from forerun_train.prompts.draw import Draw
from forerun_train.prompts.stories import story

TASKS = (
    "Write a {form} about {object}.",
    "Write a {tone} {form} about a {job} and {object}.",
    "Write a {form} in which a {animal} meets a {job} in {place}.",
    "Write a {form} about {concept} for {listener}.",
    "Write {n:3-9} sentences about {concept}.",
    "Write an email to {person} to say that {event}. Keep it {tone}.",
    "Write an invitation to a party for {purpose} on {day} in {place}.",
    "Write a {tone} message to a {job} who helped me to {activity}.",
    "List {n:3-10} {things} and describe each in one sentence.",
    "Name {n:3-8} {things} that are good for {purpose}.",
    "Make a plan for {n:3-7} days in {place} for {purpose}.",
    "Make a table with {n:3-6} {things} and one fact about each.",
    "Give step-by-step instructions to {activity}.",
    "Describe {object} with all five senses.",
    "Describe {place} in {month} in a {tone} tone.",
    "Give me {n:3-8} ideas for a {form} about {object}.",
    "Invent a name and a slogan for a shop that sells {food}.",
    "Write a quiz with {n:3-6} questions about {concept}. Give the answers at the end.",
    "Compare {concept} with {concept2} in {n:3-6} points.",
    "Explain how to {activity} in the style of a {tone} {job}.",
    "Write a recipe for {food} with a list of ingredients.",
    "Write a conversation between a {animal} and a {animal2} about {concept}.",
    "Write the first paragraph of a {tone} novel that begins in {place} with {object}.",
    "Translate into {language}: I want to {activity} with {person} in {place}.",
    "Use the words {animal}, {job} and {place} in one sentence. Then explain the sentence.",
    "Give {n:3-6} arguments for and {n} against this claim: everybody should {activity}.",
    "Define these words in one line each: {job}, {animal}, {feeling}, {tone}.",
    "Write a to-do list for a {job} on {day}.",
    "Turn this into a {tone} headline: {person} from {place} wants to {activity}.",
    "Write a job advertisement for a {job} in {place}.",
)
ON_TEXT = (
    "Who are the people in this text, and what does each of them do?\n\n{text}",
    "List all places and days in this text.\n\n{text}",
    "Rewrite the text in a {tone} tone.\n\n{text}",
    "Continue the story with {n:3-8} sentences.\n\n{text}",
    "Give the text a title, and explain your choice.\n\n{text}",
    "{text}\n\nHow do you think that {person} felt at the end?",
    "Rewrite the following as a {form}:\n\n{text}",
    "Write {n:2-5} questions that a reader could answer with this text.\n\n{text}",
    "Translate the first sentence of this text into {language}.\n\n{text}",
    "Is the mood of this text positive, negative or neutral? Give reasons.\n\n{text}",
)


def instructions(draw: Draw) -> list[str]:
    """The user's turns: mostly one."""
    if draw.chance(0.75):
        return [draw.fill(draw.one(TASKS))]
    return [draw.fill(draw.one(ON_TEXT)).replace("{text}", story(draw, draw.number(3, 10)))]
