"""Prompts of everyday conversation, of one turn or several."""

from __future__ import annotations

from forerun_train.prompts.draw import Draw

OPENINGS = (
    "Can you explain {concept} to {listener}?",
    "What is {concept}?",
    "How do I {activity}?",
    "I want to {activity}. Where should I start?",
    "What is the difference between {concept} and {concept2}?",
    "Why is {concept} important?",
    "Tell me something interesting about {concept}.",
    "I will visit {place} in {month}. What should I see there?",
    "What should I know before I travel to {place}?",
    "Which is better for {purpose}, {place} or {place2}?",
    "What does a {job} do all day?",
    "How does someone become a {job}?",
    "I feel {feeling} because {event}. What can I do?",
    "I am {feeling} today: {event}.",
    "Hi! You know that {event}, and I do not know what to say to my friends. Any advice?",
    "Can you recommend some {things} for {purpose}?",
    "What are your favorite {things}, and why?",
    "How do I make {food}?",
    "I have leftovers and want to cook {food} for {n:2-8} people. How long does it take?",
    "Is it a good idea to serve {food} for {purpose}?",
    "What do people eat in {place}?",
    "How does a {animal} live in winter?",
    "Could a {animal} and a {animal2} be friends?",
    "What would a {animal} say about {concept} if it could talk?",
    "Pretend that you are a {job} in {place}. Tell me about your day.",
    "Let us play a game: you are a {job}, and I am a {animal}. You begin.",
    "Good morning! What can you help me with?",
    "Hello, my name is {person}. I live in {place} and work as a {job}. Nice to meet you.",
    "Give me {n:3-7} reasons to {activity}.",
    "What mistakes do people make when they {activity}?",
    "Is it true that {concept} has something to do with {concept2}?",
    "How long does it take to {activity}, and what do I need?",
    "My friend {person} wants to {activity} but has little time. What would you tell {person}?",
    "What would happen without {concept}?",
    "Who are well-known {things} that every {job} should know about?",
    "I have a question about {concept}: how would {listener} notice it in daily life?",
    "What gift would you choose for a {job} who likes {things}?",
    "Can a {job} learn to {activity} in {n:2-12} weeks?",
    "How was life in {place} a hundred years ago?",
    "What is a good plan for {day} in {place} with {purpose} in mind?",
)
FOLLOW_UPS = (
    "Can you say that in simpler words?", "Why?", "Can you give me an example?", "Thank you!",
    "Make it shorter, please.", "What else should I know?",
    "How would you explain it to {listener}?","Can you put that into a list?",
    "I am not sure that I agree. Can you convince me?",
    "And what about {concept}?", "What would a {job} say about that?", "Write it as a {form}.",
    "Which of these would you start with?", "How much time does that take?",
    "Tell me more about the first point.", "Please summarize what you said in one sentence.",
    "What is the most common mistake?", "Could you say it in a more {tone} way?",
    "Does that work in {place} too?", "What should I do on {day}?",
)  # fmt: skip


def dialogue(draw: Draw) -> list[str]:
    """The user's turns of a conversation."""
    turns = [draw.fill(draw.one(OPENINGS))]
    while len(turns) < 4 and draw.chance(0.3):
        turns.append(draw.fill(draw.one(FOLLOW_UPS)))
    return [turn[:1].upper() + turn[1:] for turn in turns]
