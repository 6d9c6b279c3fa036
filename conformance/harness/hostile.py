"""What a client may give as a name, or a sandbox may print, to take over or mislead whoever looks at it: markup, templates and paths,
sequences that steer a terminal, and characters that are not seen or change the order of what is seen."""

from __future__ import annotations

import unicodedata

HOSTILE = (
    "<script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "<svg onload=\"document.title='taken'\">",
    "\"><iframe srcdoc='<script>parent.document.title=1</script>'>",
    "'><b>bold</b>",
    "</textarea></title></style></script><h1>heading</h1>",
    "<!--",
    "]]>",
    "&lt;b&gt;&amp;&#x3c;",
    "{{7*7}}${7*7}#{7*7}<%= 7*7 %>",
    "javascript:document.title='taken'",
    "data:text/html,<script>1</script>",
    "//elsewhere.example/path",
    "https://elsewhere.example/?q=1#x",
    "../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%00%0a%0d",
    "a\x00b",
    "a\x1b[31mred\x1b]0;title\x07",
    "line\nnext",
    "cr\rlf\r\n",
    "tab\tstop",
    "bell\x07\x08\x7f",
    "photo\u202egpj.exe",
    "\u2066isolate\u2069",
    "\u202bembedded\u202c",
    "zero\u200bwidth\u200d\u2060",
    "\ufeffmark",
    "soft\u00adhyphen",
    "no\u00a0break\u3000wide",
    "z" + "\u0300" * 200 + "algo",
    "\u2800\u3164\u115f",
    "\U000e0041\U000e0042tag",
    "\ue000private",
    "\ud800",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "العربية עברית",
    " leading and trailing ",
    "x" * 5000,
    "__proto__",
    "constructor",
    "-rf --help",
    "\\u003cb\\u003e \\n \\x41",
)
# Categories of characters that a terminal must not get from a client: control, format, surrogate, separators of lines.
UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def unseen(text: str) -> list[str]:
    """The characters of a text that steer a terminal or are not seen, but for line ends."""
    return [character for character in text if unicodedata.category(character) in UNSEEN and character != "\n"]
