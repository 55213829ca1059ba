"""Who is at work in a conversation: each start that names one takes it, in the same commit as its acceptance.

Under the policy *one run per session* a start is refused while another's run is not over or its outcome is not known.
Without the policy both run, and the later one carries a notice of the other.
"""

from __future__ import annotations

from datetime import datetime

from domain import action as actions
from domain import binding
from domain.binding import Run
from domain.errors import CallerError
from domain.events import SessionTaken
from domain.history import Change, action_history, run_history, run_token, session_history
from domain.ports import Store, Vault
from domain.reconciler import is_over
from domain.values import canonical


class Sessions:
    """Reservations of conversations, by tenant, endpoint and the name that the caller gave."""

    def __init__(self, store: Store, vault: Vault) -> None:
        self._store, self._vault = store, vault

    async def take(
        self, tenant: str, endpoint_id: str, session: str, action_id: str, *, exclusive: bool, at: datetime
    ) -> tuple[Change, bool]:
        """The change that takes the conversation, and whether another run is active in it.

        Raises CallerError ``session.busy`` if it has to be free and is not.
        """
        history = session_history(tenant, self._vault.digest(canonical([endpoint_id, session]))[:40])
        found = await self._store.load(history)
        last = found[-1].event if found else None
        holders = (last.action_id, *last.beside) if isinstance(last, SessionTaken) else ()
        busy = tuple([holder for holder in holders if not await self._is_over(tenant, endpoint_id, holder)])
        if busy and exclusive:
            raise CallerError("session.busy", details={"active": len(busy)})
        taken = SessionTaken(at=at, action_id=action_id, beside=busy)
        return Change(history=history, expected=len(found), events=(taken,)), bool(busy)

    async def _is_over(self, tenant: str, endpoint_id: str, action_id: str) -> bool:
        action = actions.replay(await self._store.load(action_history(tenant, action_id)))
        run_id = actions.started_run(action)
        run = Run()
        if run_id:
            run = binding.replay(await self._store.load(run_history(tenant, endpoint_id, run_token(run_id))))
        return is_over(action, run)
