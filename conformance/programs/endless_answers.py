"""A hostile server on port 8000: every request is answered with `103 Early Hints` for ever."""

import socket
import threading

HINTS = b"HTTP/1.1 103 Early Hints\r\nlink: </a>; rel=preload\r\n\r\n" * 500


def serve(connection: socket.socket) -> None:
    try:
        connection.recv(65536)
        while True:
            connection.sendall(HINTS)
    except OSError:
        connection.close()


listener = socket.create_server(("0.0.0.0", 8000), backlog=256)
print("listening", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
