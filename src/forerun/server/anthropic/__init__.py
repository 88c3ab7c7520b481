"""Endpoints with the shapes of Anthropic's Messages API."""
