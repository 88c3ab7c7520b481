"""`forerun serve`: an HTTP server whose engine runs in a process of its own."""
