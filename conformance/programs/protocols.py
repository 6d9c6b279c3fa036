"""An HTTP/1.1 server for what clients of HTTP rarely use, on the standard library alone.

Usage: protocols.py PORT.
PUT /trailers   the chunked body and its trailers, as the body and the trailers of the response.
PUT /refuse     417 to a client that waits for `100 Continue`, before its body.
GET /headers/N  a header `X-Large` of N bytes, and the size of the one in the request as the body.
GET /bytes/N    N bytes.
Any other       as `PUT` of curl does it: the number of bytes of the body, read after `100 Continue` was sent.
"""

import http.server
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_expect_100(self):
        if self.path == "/refuse":
            self.reply(417, b"", {"Connection": "close"})
            self.close_connection = True
            return False
        return super().handle_expect_100()

    def reply(self, status, body, headers=()):
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        count = int(self.path.rpartition("/")[2])
        if self.path.startswith("/headers/"):
            self.reply(200, str(len(self.headers.get("X-Large", ""))).encode(), {"X-Large": "y" * count})
        else:
            self.reply(200, bytes(count))

    def do_PUT(self):
        if self.path == "/trailers":
            return self.trailers()
        if "Content-Length" in self.headers:
            size = len(self.rfile.read(int(self.headers["Content-Length"])))
        else:
            size = len(self.chunks()[0])
        self.reply(200, str(size).encode())

    def chunks(self):
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        trailers = []
        while line := self.rfile.readline().strip():
            trailers.append(line)
        return body, trailers

    def trailers(self):
        body, trailers = self.chunks()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Trailer", "X-Sum")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s\r\n0\r\n%s\r\n\r\n" % (len(body), body, b"\r\n".join(trailers)))


http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
