"""Endpoints with the shapes of the OpenAI API."""
