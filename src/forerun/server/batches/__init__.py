"""Requests from files, in OpenAI's batch format, on the endpoints of the server."""
