"""A gateway that joins MCP servers which speak over their standard input and output behind one address of HTTP, with a token."""
