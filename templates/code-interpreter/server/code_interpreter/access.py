"""Who may run cells, and which variables the sandbox has: both are questions for the agent of the sandbox.

Whoever knows the access token of the sandbox may; where a sandbox has none, everybody who reaches the port. An answer holds until
the platform writes `/run/ringfence/sandbox.json` anew, which it does when a sandbox is given to another user, forked or resumed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import aiohttp

AGENT = "http://127.0.0.1:49983"
GIVEN = "/run/ringfence/sandbox.json"
# Tokens whose answer is kept. There is one, and what others send must not add up.
KEPT = 8
HEADER = "X-Access-Token"


class Refused(Exception):
    """The token is not that of the sandbox."""


class Unanswered(Exception):
    """The agent said neither yes nor no."""


class Access:
    """Asks the agent, and remembers what it said."""

    def __init__(self, session: aiohttp.ClientSession, agent: str | None, given: str = GIVEN) -> None:
        self._session = session
        # Without an agent everybody may: for the tests of the server alone.
        self._agent = agent
        self._given = given
        self._signature: tuple[int, ...] = ()
        self._known: dict[bytes, Mapping[str, str]] = {}

    async def variables(self, token: str | None) -> Mapping[str, str]:
        """The variables of the sandbox, for who has its token. Raises Refused and Unanswered."""
        if self._agent is None:
            return {}
        signature = self._signed()
        if signature != self._signature:
            self._known.clear()
            self._signature = signature
        key = hashlib.sha256((token or "").encode(errors="replace")).digest()
        if signature and key in self._known:
            return self._known[key]
        variables = await self._ask(token)
        # Not what was asked while the sandbox changed hands.
        if signature == self._signed():
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = variables
        return variables

    def _signed(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._given)
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size, found.st_ctime_ns

    async def _ask(self, token: str | None) -> Mapping[str, str]:
        headers = {HEADER: token} if token else {}
        try:
            async with self._session.get(f"{self._agent}/envs", headers=headers) as answer:
                if answer.status in (401, 403):
                    raise Refused
                if answer.status != 200:
                    raise Unanswered(f"the agent of the sandbox answered {answer.status}")
                said = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as failed:
            raise Unanswered("the agent of the sandbox does not answer") from failed
        if not isinstance(said, dict):
            raise Unanswered("the agent of the sandbox gave no object: expected variables and their values")
        return {str(name): value for name, value in said.items() if isinstance(value, str)}
