"""200 MB of objects, of which each line of input asks the checksum."""

import hashlib
import os
import sys

kept = {number: [os.urandom(2000), {"number": number, "text": str(number) * 3}] for number in range(90_000)}


def checksum() -> str:
    digest = hashlib.sha256()
    for number, (noise, about) in kept.items():
        assert about == {"number": number, "text": str(number) * 3}
        digest.update(noise)
    return digest.hexdigest()


first = checksum()
print("ready", flush=True)
for line in sys.stdin:
    print("whole" if checksum() == first else "broken", line.strip(), len(kept), flush=True)
