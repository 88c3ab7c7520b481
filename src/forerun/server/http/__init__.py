"""The transport: connections, access, limits, errors, streams."""
