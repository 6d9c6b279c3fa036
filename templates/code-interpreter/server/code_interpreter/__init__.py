"""The code interpreter: an HTTP server on port 49999 that runs cells in kernels and answers with a stream of events."""
