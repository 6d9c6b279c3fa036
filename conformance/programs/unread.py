"""Opens as many connections as it may have, reads the first ones for a while so that their buffers grow, and then reads
nothing and sends as much as is taken.
"""

import select
import socket
import time

HOST, PORT, COUNT, LARGE = "www.example.com", 1005, 1000, 16
BLOCK = bytes(1 << 18)
held = []
address = socket.getaddrinfo(HOST, PORT, socket.AF_INET)[0][4]
for number in range(COUNT):
    held.append(socket.create_connection(address, 60))
    if number + 1 == LARGE:
        end = time.monotonic() + 5
        while time.monotonic() < end:
            for one in select.select(held, [], [], 0.1)[0]:
                one.setblocking(False)
                try:
                    one.recv(1 << 20)
                except BlockingIOError:
                    pass
for one in held:
    one.setblocking(False)
sent, quiet = 0, 0
while quiet < 20:
    before = sent
    for one in held:
        try:
            while True:
                sent += one.send(BLOCK)
        except OSError:
            pass
    time.sleep(0.1)
    quiet = quiet + 1 if sent == before else 0
print("held", len(held), "sent", sent, flush=True)
time.sleep(86400)
